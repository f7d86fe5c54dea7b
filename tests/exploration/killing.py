"""A run that is killed at a certain moment."""

from __future__ import annotations

from gati.exploration.progress import SilentProgress


class Killed(BaseException):
    """Not an Exception: like a signal, nothing may catch it."""


class KilledAfter(SilentProgress):
    """Progress that ends everything at the given advance, counted from 1."""

    def __init__(self, advances: int) -> None:
        self.left = advances

    def advance(self, steps: int, detail: str = "") -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed
