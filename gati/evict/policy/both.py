"""Follows the cheaper of two simulated caches: furthest predicted next use, and LRU."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np

from gati.evict.cache import BlockCache
from gati.evict.index.tree import RunTree
from gati.evict.policy.base import TablePolicy
from gati.evict.policy.keyed import Lru
from gati.evict.policy.predicting import FurthestPredicted
from gati.evict.predict.base import Predictor


class FollowCheaper(TablePolicy):
    """Simulates both; follows one until it has missed twice as many blocks as the other.

    Evicts blocks that the followed cache does not hold, the least recent first. The predictor sees the
    requests of the simulated cache, so `self.predictor` is None.
    """

    name = "blindoracle+lru"
    predicts = True

    def __init__(self, tree: RunTree, capacity: int, predictor: Predictor, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, seed=seed)
        self._caches = (
            BlockCache(FurthestPredicted(RunTree(flat=tree.flat), capacity, predictor)),
            BlockCache(Lru(RunTree(flat=tree.flat), capacity)),
        )
        self._held: tuple[set[int], set[int]] = (set(), set())
        self._missed = [0, 0]
        self._followed = self._switches = 0

    def begin(self, ids: list[int], hits: int, time_s: float) -> None:
        """Let both serve the request, then choose which to follow."""
        for number, cache in enumerate(self._caches):
            served = cache.access(ids, time_s)
            self._missed[number] += len(ids) - served.hits
            self._held[number].update(ids)
            self._held[number].difference_update(served.evicted)
        if self._missed[self._followed] >= 2 * max(self._missed[1 - self._followed], 1):
            self._followed = 1 - self._followed
            self._switches += 1

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Evict blocks that the followed cache does not hold; as LRU if all of those are locked."""
        held = self._held[self._followed]
        slots = np.flatnonzero(self._leaf[: len(self._runs)])
        heap = sorted(zip(self._recency[slots].tolist(), slots.tolist(), strict=True))
        removed: list[int] = []
        while count > 0:
            if not heap:
                self._take(count, self._by_recency(), removed)
                break
            _, slot = heapq.heappop(heap)
            spare = self._spare(slot, held)
            if spare == 0:
                continue
            taken, parent = self._cut(slot, min(spare, count), removed)
            count -= taken
            if parent is not None:
                heapq.heappush(heap, (float(self._recency[parent.slot]), parent.slot))
        return removed

    def figures(self) -> Mapping[str, Any]:
        """The counts of the simulated cache with predictions, and the number of switches."""
        return {**self._caches[0].figures(), "switches": self._switches}

    def _spare(self, slot: int, held: set[int]) -> int:
        """Number of blocks at the end of a run that the followed cache lacks."""
        run = self._runs[slot]
        assert run is not None
        return len(run.ids) - bisect_left(run.ids, True, key=lambda block: block not in held)
