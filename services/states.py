"""Names in the replies of an inference service that other processes act on."""

from __future__ import annotations

BASE_VERSION = "base"  # the version without caches
STUCK = "stuck"  # an input has run for longer than any should take: the process must be killed
BROKEN = "broken"  # the engine fails for every input: the process must be killed
