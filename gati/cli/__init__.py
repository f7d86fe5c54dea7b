"""The command line: `gati VERB`, one function per verb, each a thin wrapper over the library."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gati.cli.commands import app as app
    from gati.cli.running import run as run

__all__ = ["app", "main", "run"]


def main() -> None:
    """Run the command line of this process and exit with its status."""
    try:
        from gati.cli.running import run
    except KeyboardInterrupt:  # imports take long enough for a Ctrl-C
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    status = run(sys.argv[1:])
    gc.freeze()  # at exit, the interpreter would spend a second collecting garbage in torch
    sys.exit(status)


def __getattr__(name: str) -> Any:
    """Import `app` and `run` at their first use, so that `main` sees a Ctrl-C meanwhile."""
    if name == "app":
        from gati.cli.commands import app

        return app
    if name == "run":
        from gati.cli.running import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
