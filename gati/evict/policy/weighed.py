"""LARU for blocks that take different times to compute.

Attention reads everything before a token, so a block costs more the more blocks are above it: with n of them,
1 + g n times as much as the first one. A cache that counts blocks evicts long conversations before short
ones, because each takes the place of many. When one returns, it takes long to compute, and all requests
behind it wait. So what counts here is the time that a hit saves: leaves are ranked by their predicted time
until the next use, divided by their cost.
"""

from __future__ import annotations

import numpy as np

from gati.errors import EvictError
from gati.evict.index.tree import BlockRun, RunTree
from gati.evict.policy.base import Floats
from gati.evict.policy.predicting import Laru
from gati.evict.predict.base import Predictor, grown


class PathCosts:
    """What blocks cost to compute, in multiples of the first block of a path.

    >>> costs = PathCosts(0.5)
    >>> costs.at(0), costs.at(2), costs.upto(3)
    (1.0, 2.0, 4.5)
    """

    __slots__ = ("growth",)

    def __init__(self, growth: float = 0.0, *, flat: bool = False) -> None:
        """Raises EvictError if the cost would fall with depth or is not a number, or if a cache is `flat`."""
        if not 0.0 <= growth < np.inf:
            raise EvictError(f"cost_growth is {growth}; give a number from 0, such as 0.02")
        if growth and flat:
            raise EvictError(
                "cost_growth needs paths: blocks without parents all cost the same; leave it out"
            )
        self.growth = growth

    def at(self, above: int) -> float:
        """The cost of a block with `above` blocks above it."""
        return 1.0 + self.growth * above

    def upto(self, blocks: int) -> float:
        """The cost of the first blocks of a path."""
        return blocks + self.growth * (0.5 * blocks * (blocks - 1))


class WeighedLaru(Laru):
    """LARU that ranks leaves by predictions divided by costs, if `cost_growth` is not 0.

    Predictions must then be times from now. LARU's own bound counts blocks, so it holds without costs only.
    """

    weighs_costs = True

    def __init__(
        self,
        tree: RunTree,
        capacity: int,
        predictor: Predictor,
        *,
        seed: int = 0,
        cost_growth: float = 0.0,
    ) -> None:
        super().__init__(tree, capacity, predictor, seed=seed)
        self._costs = PathCosts(cost_growth, flat=tree.flat)
        self._last_costs = np.ones(64)  # by slot: what the run's last block costs

    def _enter(self, run: BlockRun) -> None:
        super()._enter(run)
        self._last_costs = grown(self._last_costs, run.slot + 1)
        self._last_costs[run.slot] = self._costs.at(run.end - 1)

    def _cut(self, slot: int, count: int, removed: list[int]) -> tuple[int, BlockRun | None]:
        run = self._runs[slot]
        taken, parent = super()._cut(slot, count, removed)
        if run is not None and run.ids:
            self._last_costs[slot] = self._costs.at(run.end - 1)
        return taken, parent

    def _predicted(self) -> Floats:
        if not self._costs.growth:
            return super()._predicted()
        times = self._next_uses()
        return self._by_recency() if times is None else times / self._last_costs[: len(self._runs)]
