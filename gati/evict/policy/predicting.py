"""Policies that follow predictions: furthest predicted next use, the same among the oldest, LARU.

LARU follows "Learned Least Recently Used" (arXiv 2509.20979), with two corrections that its proof needs on a
tree: phases end between requests, and the candidates are a share of the leaves, not of the capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.index.tree import RunTree
from gati.evict.policy.base import ALL_LOCKED, Floats, PredictingPolicy
from gati.evict.predict.base import Predictor


class FurthestPredicted(PredictingPolicy):
    """Evicts the leaf with the furthest predicted next use (BlindOracle). Optimal with exact predictions."""

    name = "fpb"

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Evict the leaves with the furthest predicted next use."""
        removed: list[int] = []
        self._take(count, self._predicted(), removed)
        return removed


class OptimalLeaf(FurthestPredicted):
    """Evicts the leaf whose actual next use is furthest: what an engine gains from perfect predictions."""

    name = "opt-leaf"
    foresees = True


class Windowed(PredictingPolicy):
    """Evicts the furthest predicted of the leaves that LRU would evict first."""

    def _oldest(self, candidates: int) -> NDArray[np.int64]:
        """Slots of up to `candidates` leaves that LRU would evict first. Raises EvictError if none exist."""
        slots = np.flatnonzero(self._leaf[: len(self._runs)])
        if len(slots) == 0:
            raise EvictError(ALL_LOCKED)
        if len(slots) <= candidates:
            return slots
        return slots[np.argpartition(self._recency[slots], candidates - 1)[:candidates]]

    def _furthest(self, slots: NDArray[np.int64], scores: Floats) -> int:
        """The slot with the furthest prediction; of several, the one that LRU evicts first."""
        return int(slots[np.lexsort((self._recency[slots], -scores[slots]))[0]])


class Halp(Windowed):
    """Evicts the furthest predicted of the four leaves that LRU would evict first (HALP)."""

    name = "hf"

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Choose among four candidates at every step."""
        scores = self._predicted()
        removed: list[int] = []
        while len(removed) < count:
            slots = self._oldest(4)
            self._cut(self._furthest(slots, scores), count - len(removed), removed)
        return removed


class Laru(Windowed):
    """LARU: follows predictions; each wrong one that is caught halves the part of LRU's queue to choose from.

    A phase ends before the request that would bring it to more than k distinct blocks. A predicted eviction
    is caught if the block is requested again in the same phase; LRU then chooses the block to evict for it.
    With exact predictions nothing is caught, and LARU equals `opt-leaf`; with any predictions, misses are at
    most 2k (OPT + 1).
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
        """Begin a new phase if the request does not fit into this one."""
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
        """Evict one block for each of the last `count` of `missing`, in order."""
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
        """Choose from a share of the current leaves, whose number may fall with each eviction."""
        leaves = self._leaf[: len(self._runs)]
        scores: Floats | None = None
        while count > 0:
            slots = self._oldest(max(int(self._share * np.count_nonzero(leaves)), 1))
            slot = int(slots[0])
            if len(slots) > 1:  # with one candidate, no prediction is needed
                scores = self._predicted() if scores is None else scores
                slot = self._furthest(slots, scores)
            count -= self._cut(slot, count, removed)[0]
