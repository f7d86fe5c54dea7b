"""The command line: `gati VERB`, one function per verb, each a thin wrapper over the library."""

from gati.cli.commands import app, main, run

__all__ = ["app", "main", "run"]
