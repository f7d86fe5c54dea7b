"""Marker policies with predictions, for flat traces: each bounds what wrong predictions can cost.

Predictive marker: Lykouris and Vassilvitskii 2018; LMarker: Rohatgi 2020; guard: 2025. All of them handle
single blocks: the missing blocks of a batch are processed in order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.index.tree import BlockRun, RunTree
from gati.evict.policy.base import ALL_LOCKED, Floats, PredictingPolicy
from gati.evict.predict.base import Predictor, grown


class _Phased(PredictingPolicy):
    """Base of the three: a set of candidates; when it is empty, a new phase begins."""

    flat_only = True

    def __init__(self, tree: RunTree, capacity: int, predictor: Predictor, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, predictor, seed=seed)
        self._random = np.random.default_rng(seed)
        self._old = np.zeros(64, dtype=bool)  # by slot: cached when the phase began and not used in it
        self._stale: set[int] = set()  # blocks cached when the phase began
        self._phases = 0

    def begin(self, ids: list[int], hits: int, time_s: float) -> None:
        """Mark requested blocks that are cached."""
        for block in ids:
            run = self.tree.heads.get(block)
            if run is not None:
                self._visited(run)

    def touch(self, path: list[BlockRun], known: int) -> None:
        """Mark loaded blocks."""
        super().touch(path, known)
        for run in path:
            self._visited(run)

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Evict one block for each of the last `count` of `missing`, in order."""
        removed: list[int] = []
        for block in missing[-count:]:
            if len(self._unmarked()) == 0:
                self._new_phase()
                if len(self._unmarked()) == 0:
                    raise EvictError(ALL_LOCKED)
            slot = self._victim(block)
            self._old[slot] = False
            self._cut(slot, 1, removed)
            self._left(removed[-1], block)
        return removed

    def figures(self) -> Mapping[str, Any]:
        """Number of phases."""
        return {**super().figures(), "phases": self._phases}

    def _new_phase(self) -> None:
        self._phases += 1
        count = len(self._runs)
        self._old[:count] = self._leaf[:count]
        self._stale = set(self.tree.heads)

    @abstractmethod
    def _victim(self, block: int) -> int:
        """The slot of the run to evict for `block`."""

    def _left(self, victim: int, block: int) -> None:
        """`victim` was evicted for `block`."""

    def _visited(self, run: BlockRun) -> None:
        self._old[run.slot] = False

    def _enter(self, run: BlockRun) -> None:
        super()._enter(run)
        self._old = grown(self._old, run.slot + 1)

    def _unmarked(self) -> NDArray[np.int64]:
        count = len(self._runs)
        return np.flatnonzero(self._old[:count] & self._leaf[:count])

    def _furthest(self, slots: NDArray[np.int64]) -> int:
        scores: Floats = self._predicted()
        return int(slots[scores[slots].argmax()])

    def _any(self, slots: NDArray[np.int64]) -> int:
        return int(self._random.choice(slots))


class PredictiveMarker(_Phased):
    """Evicts the furthest predicted unmarked block, or a random one once its eviction chain is too long."""

    name = "predictive-marker"

    def __init__(self, tree: RunTree, capacity: int, predictor: Predictor, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, predictor, seed=seed)
        self._longest = float((1.0 / np.arange(1, capacity + 1)).sum())  # H_k
        self._chains: dict[int, int] = {}  # the last victim of each chain: how long the chain is

    def _new_phase(self) -> None:
        super()._new_phase()
        self._chains.clear()

    def _victim(self, block: int) -> int:
        slots = self._unmarked()
        if block in self._stale and self._chains.get(block, 0) + 1 > self._longest:
            return self._any(slots)
        return self._furthest(slots)

    def _left(self, victim: int, block: int) -> None:
        self._chains[victim] = self._chains.pop(block, 0) + 1 if block in self._stale else 1


class LMarker(_Phased):
    """Evicts, for blocks new to the phase, the furthest predicted unmarked block; else a random one."""

    name = "lmarker"

    def _victim(self, block: int) -> int:
        slots = self._unmarked()
        return self._any(slots) if block in self._stale else self._furthest(slots)


class GuardedBelady(_Phased):
    """Evicts the furthest predicted block; one that returns in the same phase is then safe until its end."""

    name = "guard"

    def __init__(self, tree: RunTree, capacity: int, predictor: Predictor, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, predictor, seed=seed)
        self._gone: set[int] = set()  # evicted in this phase
        self._safe: set[int] = set()

    def _new_phase(self) -> None:
        super()._new_phase()
        self._gone.clear()
        self._safe.clear()

    def _victim(self, block: int) -> int:
        if block in self._gone:
            self._safe.add(block)
            return self._any(self._unmarked())
        count = len(self._runs)
        slots = np.flatnonzero(self._leaf[:count])
        free = [
            slot for slot in slots if (run := self._runs[slot]) is not None and run.ids[0] not in self._safe
        ]
        return self._furthest(np.array(free)) if free else self._any(self._unmarked())

    def _left(self, victim: int, block: int) -> None:
        self._gone.add(victim)
