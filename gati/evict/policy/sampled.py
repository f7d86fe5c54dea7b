"""`gati` for caches of more than a million blocks, whose shadow keeps a sample of the keys.

The hash of a block decides whether it is sampled (SHARDS, Waldspurger et al. 2015): one in `every` blocks is,
and an LRU of k / every keys shows which of these would be cached. The blocks of a path are used from the
last to the first, so the first ones stay longest. X and n count sampled blocks.

A sample gives no certainty, so the guard is a statistical test. The loss of a request is z = (1 + LRU's hits
- own hits, per sampled block) / 2, and the promise is a mean of at most (1 + eps) / 2. The detector of
`gati.guard` bets against it; after an alarm, LRU decides until X <= eps n. While the promise is kept, the
probability of an alarm within t requests is at most t / R. Where blocks differ in cost, all of this counts
their costs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from gati.evict.index.tree import BlockRun, RunTree
from gati.evict.policy.guard import EXCESS_SHARE
from gati.evict.policy.weighed import WeighedLaru
from gati.evict.predict.base import Predictor
from gati.guard.detector import Guard

WHOLE_SHADOW = 1_000_000  # largest cache, in blocks, whose keys are all shadowed; beyond, the sample's size
_TO_FALSE_ALARM = 10_000.0  # R, in requests
_BET_AGAINST = (0.505, 0.51, 0.52, 0.55, 0.6, 0.7)  # mean losses: LRU ahead by 1 to 40 points
_ODD = 0x9E3779B97F4A7C15


def loss_detector() -> Guard:
    """A detector for losses in [0, 1] whose mean is promised to be at most (1 + eps) / 2."""
    return Guard(0.5 * (1.0 - EXCESS_SHARE), _TO_FALSE_ALARM, _BET_AGAINST)


class SampledLru:
    """A sample, one in `every`, of the blocks that an LRU cache of `capacity` blocks would hold."""

    def __init__(self, capacity: int, every: int) -> None:
        self._every = every
        self._capacity = max(capacity // every, 1)
        self._limit = 2**32 // every
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def limit(self, capacity: int) -> None:
        """Change the capacity."""
        self._capacity = max(capacity // self._every, 1)
        self._trim()

    def sampled(self, ids: list[int]) -> list[int]:
        """Positions of the sampled blocks."""
        limit = self._limit
        return [place for place, block in enumerate(ids) if (hash(block) * _ODD & 2**64 - 1) >> 32 < limit]

    def access(self, blocks: list[int]) -> list[bool]:
        """Serve the sampled blocks of a request, from the root down; return which of them LRU held."""
        order = self._order
        held = [block in order for block in blocks]
        for block in reversed(blocks):
            order[block] = None
            order.move_to_end(block)
        self._trim()
        return held

    def forget(self, blocks: Iterable[int]) -> None:
        """The engine dropped these blocks on its own: LRU would not have them, either."""
        for block in blocks:
            self._order.pop(block, None)

    def _trim(self) -> None:
        while len(self._order) > self._capacity:
            self._order.popitem(last=False)


class SampledGati(WeighedLaru):
    """LARU with a guard that watches a sample of the blocks."""

    name = "gati"

    def __init__(
        self,
        tree: RunTree,
        capacity: int,
        predictor: Predictor,
        *,
        seed: int = 0,
        cost_growth: float = 0.0,
    ) -> None:
        super().__init__(tree, capacity, predictor, seed=seed, cost_growth=cost_growth)
        self._every = -(-capacity // WHOLE_SHADOW)
        self._shadow = SampledLru(capacity, self._every)
        self._detector = loss_detector()
        self._excess = self._seen = 0.0  # X and n, of sampled blocks
        self._following = True
        self._alarms = self._served = self._followed = 0

    @property
    def excess(self) -> int:
        """X: blocks missed beyond LRU, or their cost, estimated from the sample; negative if less."""
        return round(self._excess * self._every)

    @property
    def following(self) -> bool:
        """Whether predictions decide."""
        return self._following

    def begin(self, ids: list[int], hits: int, time_s: float) -> None:
        """Compare the sampled blocks of the request with the shadow."""
        places = self._shadow.sampled(ids)
        if places:
            heads = self.tree.heads
            own = (ids[place] in heads if self.tree.flat else place < hits for place in places)
            costs = [self._costs.at(place) for place in places]
            lru = self._shadow.access([ids[place] for place in places])
            behind = sum(cost * (held - kept) for cost, held, kept in zip(costs, lru, own, strict=True))
            self._judge(sum(costs), behind)
        self._served += 1
        self._followed += self._following
        super().begin(ids, hits, time_s)

    def resume(self, ids: list[int], held: list[int]) -> None:
        """LRU would store the same blocks; nothing was requested, so nothing counts."""
        super().resume(ids, held)
        self._shadow.access([held[place] for place in self._shadow.sampled(held)])

    def limit(self, capacity: int) -> None:
        """LRU would hold no more, either."""
        self._shadow.limit(capacity)

    def drop(self, run: BlockRun, count: int) -> list[int]:
        """Remove blocks that the engine dropped on its own."""
        removed = super().drop(run, count)
        self._shadow.forget(removed)
        return removed

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Evict as LARU; as LRU after an alarm."""
        if self._following:
            return super().evict(count, missing)
        removed: list[int] = []
        self._take(count, self._by_recency(), removed)
        return removed

    def figures(self) -> Mapping[str, Any]:
        """The counts of LARU and of the guard; one in `one_in` blocks is sampled."""
        return {
            **super().figures(),
            "guard": {
                "excess": self.excess,
                "allowance": EXCESS_SHARE * self._seen * self._every,
                "alarms": self._alarms,
                "share_learned": self._followed / max(self._served, 1),
                "one_in": self._every,
            },
        }

    def _judge(self, asked: float, behind: float) -> None:
        """Judge a request whose sampled blocks cost `asked`; what LRU held cost `behind` more."""
        self._seen += asked
        self._excess += behind
        if self._following:
            if self._detector.observe(0.5 * (1.0 + behind / asked)):
                self._following = False
                self._alarms += 1
        elif self._excess <= EXCESS_SHARE * self._seen:
            self._following = True
            self._detector.reset()
