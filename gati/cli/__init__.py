"""The command line: `gati VERB`, one function a verb, each a few lines over the library."""

from gati.cli.commands import app, main, run

__all__ = ["app", "main", "run"]
