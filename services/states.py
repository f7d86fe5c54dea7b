"""Words of an inference service that others act on."""

from __future__ import annotations

BASE_VERSION = "base"  # what it calls a model without caches
STUCK = "stuck"  # an input has been worked on for longer than anything takes: the process has to go
