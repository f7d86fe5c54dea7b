"""The command line: `gati VERB`, one function per verb, each a thin wrapper over the library."""

from __future__ import annotations

import gc
import io
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gati.cli.commands import app as app
    from gati.cli.running import run as run

__all__ = ["app", "main", "run"]


def main() -> None:
    """Run the command line of this process and exit with its status."""
    _open_streams()
    try:
        from gati.cli.running import run
    except KeyboardInterrupt:  # imports take long enough for a Ctrl-C
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    status = run(sys.argv[1:])
    gc.freeze()  # at exit, the interpreter would spend a second collecting garbage in torch
    sys.exit(status)


def _open_streams() -> None:
    """Let neither a closed stream nor a character that the locale lacks end a verb."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def __getattr__(name: str) -> Any:
    """Import `app` and `run` at their first use, so that `main` sees a Ctrl-C meanwhile."""
    if name == "app":
        from gati.cli.commands import app

        return app
    if name == "run":
        from gati.cli.running import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
