"""Decides whether predictions would have done better than LRU, without following them.

Whenever LRU evicts a block, predictions name the block that they would have evicted. Of the two, the one that
is requested first should have stayed cached. Nothing else is simulated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_MEMORY = 200.0  # duels; older ones fade
_NEEDED = 100.0  # before there is a verdict
_LEAD = 0.8  # (wins - losses) / all; predictions of which half are reversed come near


class Duels:
    """Open duels, at most `capacity`, and the results of recent ones."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # by block: its opponent, and whether predictions named it
        self._open: OrderedDict[int, tuple[int, bool]] = OrderedDict()
        self._lead = _LEAD
        self._won = self._lost = 0.0

    def add(self, lru: int, predicted: int) -> None:
        """LRU evicted the block `lru`; predictions would have evicted `predicted`."""
        if lru == predicted or lru in self._open or predicted in self._open:
            return
        self._open[lru] = (predicted, False)
        self._open[predicted] = (lru, True)
        while len(self._open) > 2 * self._capacity:
            _, (other, _) = self._open.popitem(last=False)
            del self._open[other]

    def requested(self, ids: Sequence[int]) -> None:
        """End the duels of blocks that are requested."""
        if not self._open:
            return
        for block in ids:
            ended = self._open.pop(block, None)
            if ended is None:
                continue
            other, predicted = ended
            del self._open[other]
            keep = 1.0 - 1.0 / _MEMORY
            self._won = keep * self._won + (not predicted)
            self._lost = keep * self._lost + predicted

    @property
    def won(self) -> bool:
        """Whether predictions were clearly better recently."""
        ended = self._won + self._lost
        return ended >= _NEEDED and self._won - self._lost >= self._lead * ended

    def begin_again(self) -> None:
        """The verdict was wrong: reset, and require a clearer lead next time."""
        self._lead = 0.5 * (1.0 + self._lead)
        self._open.clear()
        self._won = self._lost = 0.0
