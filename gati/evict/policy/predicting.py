"""Policies that follow predictions: furthest predicted next use, the same among the oldest, LARU.

LARU is that of "Learned Least Recently Used" (arXiv 2509.20979) with the corrections that make its proof hold
on a tree: phases are cut between requests, and the candidates are a share of the leaves, not of the capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.index.tree import RunTree
from gati.evict.policy.base import Floats, PredictingPolicy
from gati.evict.predict.base import Predictor


class FurthestPredicted(PredictingPolicy):
    """The leaf whose predicted next use is furthest (BlindOracle). Perfect predictions make it optimal."""

    name = "fpb"

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """The furthest predicted."""
        removed: list[int] = []
        self._take(count, self._predicted(), removed)
        return removed


class OptimalLeaf(FurthestPredicted):
    """The leaf that is really used furthest from now: what perfect predictions give an engine."""

    name = "opt-leaf"


class Windowed(PredictingPolicy):
    """The furthest predicted among those leaves that LRU would take first."""

    def _oldest(self, candidates: int) -> NDArray[np.int64]:
        """Slots of the leaves that LRU would take first, at most so many. Raises EvictError for none."""
        slots = np.flatnonzero(self._leaf[: len(self._runs)])
        if len(slots) == 0:
            raise EvictError("no block can be evicted: all are locked by active requests")
        if len(slots) <= candidates:
            return slots
        return slots[np.argpartition(self._recency[slots], candidates - 1)[:candidates]]


class Halp(Windowed):
    """The furthest predicted among the four leaves that LRU would take first (HALP)."""

    name = "hf"

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Four candidates for every block."""
        scores = self._predicted()
        removed: list[int] = []
        while len(removed) < count:
            slots = self._oldest(4)
            self._cut(int(slots[scores[slots].argmax()]), count - len(removed), removed)
        return removed


class Laru(Windowed):
    """LARU: follow predictions; each one caught wrong halves the part of LRU's queue they may choose from.

    A phase ends before the request with which more than k different blocks would have been requested in it.
    An eviction by prediction is caught when the block is requested in the same phase; the block that makes
    room for it is then LRU's choice. With exact predictions nothing is caught and it is `opt-leaf`; with any,
    misses are at most 2k (OPT + 1).
    """

    name = "laru"

    def __init__(self, tree: RunTree, capacity: int, predictor: Predictor, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, predictor, seed=seed)
        self._requested: set[int] = set()  # D
        self._evicted: set[int] = set()  # E
        self._share = 1.0  # lambda
        self._phases = 1
        self._caught = 0

    def begin(self, ids: list[int], hits: int, time_s: float) -> None:
        """Begin a new phase where the request does not fit into this one."""
        new = set(ids)
        new -= self._requested
        if len(self._requested) + len(new) > self.capacity:
            self._requested = set(ids)
            self._evicted.clear()
            self._share = 1.0
            self._phases += 1
        else:
            self._requested |= new

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """One block for each of the last `count` of `missing`, in order."""
        removed: list[int] = []
        loaded = missing[-count:]
        if self._evicted.isdisjoint(loaded):
            self._follow(count, removed)
            return removed
        begin = 0
        while begin < count:
            caught = loaded[begin] in self._evicted
            end = begin + 1
            while end < count and (loaded[end] in self._evicted) is caught:
                end += 1
            if caught:
                self._take(end - begin, self._by_recency(), removed)
                self._caught += end - begin
                self._share *= 0.5 ** min(end - begin, 64)
            else:
                self._follow(end - begin, removed)
            begin = end
        return removed

    def figures(self) -> Mapping[str, Any]:
        """Phases, and predictions caught wrong."""
        return {**super().figures(), "phases": self._phases, "caught": self._caught}

    def _follow(self, count: int, removed: list[int]) -> None:
        before = len(removed)
        if self._share == 1.0:
            self._take(count, self._predicted(), removed)
        else:
            self._follow_some(count, removed)
        self._evicted.update(removed[before:])

    def _follow_some(self, count: int, removed: list[int]) -> None:
        """The share is of the leaves there are at each eviction, of which a run that goes may leave fewer."""
        leaves = self._leaf[: len(self._runs)]
        scores: Floats | None = None
        while count > 0:
            slots = self._oldest(max(int(self._share * np.count_nonzero(leaves)), 1))
            slot = slots[0]
            if len(slots) > 1:  # else there is nothing to ask
                scores = self._predicted() if scores is None else scores
                slot = slots[scores[slots].argmax()]
            count -= self._cut(int(slot), count, removed)[0]
