"""Whose turn it is: models share one thread by their shares of its time."""

from __future__ import annotations

from collections.abc import Collection, Mapping

__all__ = ["Turns"]


class Turns:
    """Stride scheduling: the next turn is that of whoever has used least, measured by its share.

    `shares` are of any scale. Who did not want any time for a while has saved none up.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        self.shares = {name: share / total for name, share in shares.items()}
        self.used_s = dict.fromkeys(shares, 0.0)
        self._pass = dict.fromkeys(shares, 0.0)  # seconds by share
        self._least = 0.0  # of whom had the last turn

    def next(self, waiting: Collection[str]) -> str:
        """Whose turn it is of those that wait; those of equal standing go in their order."""
        for name in waiting:
            self._pass[name] = max(self._pass[name], self._least)
        chosen = min(waiting, key=lambda name: self._pass[name])
        self._least = self._pass[chosen]
        return chosen

    def used(self, name: str, seconds: float) -> None:
        """So much time was used in a turn."""
        self.used_s[name] += seconds
        self._pass[name] += seconds / self.shares[name]
