"""Words that output is made of."""

from __future__ import annotations

import shlex
from pathlib import Path


def quoted(path: str | Path) -> str:
    """A path as a shell reads it, so that a command that is shown can be pasted."""
    return shlex.quote(str(path))


def counted(number: int, what: str) -> str:
    """A number of things, such as `1 thread` and `2 threads`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
