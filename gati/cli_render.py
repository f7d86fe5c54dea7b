"""How results look in a terminal. Everything here reads records and prints; nothing computes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def error(message: str) -> None:
    """Print one line on stderr, red where there is a terminal."""
    line = "error: " + " ".join(message.split())
    if sys.stderr.isatty():
        line = f"\x1b[31m{line}\x1b[0m"
    print(line, file=sys.stderr)
