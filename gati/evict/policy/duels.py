"""Whether predictions are better than LRU: by duels, whichever of the two is followed, and by outcomes.

At each eviction LRU and the predictions both name the block that they would evict. Of the two, the one that
is requested first should have stayed. Nothing else is simulated. Gains and losses are the blocks that were
requested when only one of two caches had them: the one that predictions filled, or LRU's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

_MEMORY = 200.0  # duels; older ones fade
_NEEDED = 100.0  # before predictions are tried again
_LEAD = 0.8  # wins less losses, of all; predictions half of which are turned round come near
_FEW_NEEDED = 40.0  # before predictions with that lead are trusted
_FEWEST_NEEDED, _SMALL_LEAD = 10.0, 0.3  # before they are doubted less
_OUTCOMES = 2.0  # over how many requested blocks outcomes fade, in capacities
_FEW_OUTCOMES = 0.02  # in capacities; fewer say too little


def faded(requested: int, memory: float) -> float:
    """The share that is left, after a request, of counts that fade over `memory` requested blocks."""
    return max(1.0 - requested / memory, 0.0)


def _equal(place: int) -> float:
    return 1.0


class Duels:
    """Open duels, at most `capacity`, and how the last ones ended."""

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

    def requested(self, ids: Sequence[int], weight: Callable[[int], float] = _equal) -> None:
        """End the duels of blocks that are requested; a block counts by its place in `ids`."""
        if not self._open:
            return
        for place, block in enumerate(ids):
            ended = self._open.pop(block, None)
            if ended is None:
                continue
            other, predicted = ended
            del self._open[other]
            keep = 1.0 - 1.0 / _MEMORY
            self._won *= keep
            self._lost *= keep
            if predicted:
                self._lost += weight(place)
            else:
                self._won += weight(place)

    @property
    def won(self) -> bool:
        """Whether predictions are clearly better of late."""
        return self._leads(_NEEDED, self._lead)

    @property
    def leading(self) -> bool:
        """Whether predictions have won nearly all of the latest duels."""
        return self._leads(_FEW_NEEDED, _LEAD)

    @property
    def ahead(self) -> bool:
        """Whether predictions have won more of the latest duels than they lost."""
        return self._leads(_FEWEST_NEEDED, _SMALL_LEAD)

    @property
    def behind(self) -> bool:
        """Whether predictions have lost more of the latest duels than they won."""
        return self._won + self._lost >= _FEWEST_NEEDED and self._lost > self._won

    def _leads(self, needed: float, lead: float) -> bool:
        ended = self._won + self._lost
        return ended >= needed and self._won - self._lost >= lead * ended

    def begin_again(self) -> None:
        """What was told was wrong: forget it, and ask for more next time."""
        self._lead = 0.5 * (1.0 + self._lead)
        self._open.clear()
        self._won = self._lost = 0.0


class GainsAndLosses:
    """Blocks of recent requests that only the followed cache had, and those that only LRU's had."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._gained = self._lost = 0.0

    def add(self, requested: int, *, gained: float, lost: float) -> None:
        """A request of `requested` blocks."""
        keep = faded(requested, _OUTCOMES * self._capacity)
        self._gained = keep * self._gained + gained
        self._lost = keep * self._lost + lost

    @property
    def gaining(self) -> bool:
        """Whether no more was lost than gained."""
        return self._gained >= self._lost

    @property
    def paying(self) -> bool:
        """Whether nearly twice as much was gained as lost."""
        both = self._gained + self._lost
        return both > 0.0 and self._gained - self._lost >= _SMALL_LEAD * both

    @property
    def few(self) -> bool:
        """Whether too little was gained and lost to say anything."""
        return self._gained + self._lost < _FEW_OUTCOMES * self._capacity
