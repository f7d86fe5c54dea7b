"""Policies without predictions: LRU, FIFO, LFU, SLRU, tail-optimised LRU."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import OrderedDict

import numpy as np

from gati.errors import EvictError
from gati.evict.index.tree import BlockRun, RunTree
from gati.evict.policy.base import ALL_LOCKED, EvictionPolicy, TablePolicy
from gati.evict.predict.base import grown

_LATER = 2.0**40  # more accesses than any recency number


class Lru(EvictionPolicy):
    """Evicts the least recently used leaf. In the list of all runs, children come before parents."""

    name = "lru"

    def __init__(self, tree: RunTree, capacity: int, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, seed=seed)
        self._order: OrderedDict[BlockRun, None] = OrderedDict()

    def split(self, upper: BlockRun, lower: BlockRun) -> None:
        """Append the upper part, so that it comes after the lower one."""
        self._order[upper] = None

    def touch(self, path: list[BlockRun], known: int) -> None:
        """Move the path to the end, the deepest run first."""
        order = self._order
        for run in reversed(path):
            order[run] = None
            order.move_to_end(run)

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Take runs from the front; locked runs and their ancestors stay."""
        order, tree = self._order, self.tree
        removed: list[int] = []
        kept: list[BlockRun] = []
        while len(removed) < count:
            if not order:
                raise EvictError(ALL_LOCKED)
            run = next(iter(order))
            if run.locks or run.children:
                order.popitem(last=False)
                kept.append(run)
                continue
            taken = min(count - len(removed), len(run.ids))
            if taken == len(run.ids):
                order.popitem(last=False)
            removed += tree.trim(run, taken)[0]
        for run in reversed(kept):
            order[run] = None
            order.move_to_end(run, last=False)
        return removed

    def drop(self, run: BlockRun, count: int) -> list[int]:
        """Remove the blocks, and the run if it has none left."""
        if count == len(run.ids):
            del self._order[run]
        return self.tree.trim(run, count)[0]


class _Ranked(TablePolicy):
    """Evicts the leaf of the lowest rank; ranks are set when a run is used."""

    def __init__(self, tree: RunTree, capacity: int, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, seed=seed)
        self._rank = np.zeros(64, dtype=np.float64)

    def split(self, upper: BlockRun, lower: BlockRun) -> None:
        """Both parts keep the rank; only the lower part is a leaf."""
        super().split(upper, lower)
        self._rank[upper.slot] = self._rank[lower.slot]

    def touch(self, path: list[BlockRun], known: int) -> None:
        """Set the ranks of the used runs."""
        super().touch(path, known)
        for run in path:
            self._rank[run.slot] = self._rank_of(run, float(self._recency[run.slot]))

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Evict the leaves of the lowest ranks."""
        removed: list[int] = []
        self._take(count, -self._rank[: len(self._runs)], removed)
        return removed

    def _enter(self, run: BlockRun) -> None:
        super()._enter(run)
        self._rank = grown(self._rank, run.slot + 1)

    @abstractmethod
    def _rank_of(self, run: BlockRun, recency: float) -> float:
        """The rank of a run that is used now."""


class Fifo(_Ranked):
    """Evicts the leaf that was loaded first."""

    name = "fifo"

    def _rank_of(self, run: BlockRun, recency: float) -> float:
        return recency if run.accesses == 1 else float(self._rank[run.slot])


class Lfu(_Ranked):
    """Evicts the leaf used least often since it was loaded; ties go to the least recent."""

    name = "lfu"

    def _rank_of(self, run: BlockRun, recency: float) -> float:
        return run.accesses * _LATER + recency


class Slru(_Ranked):
    """Evicts leaves used once before those used again; within each group, the least recent first."""

    name = "slru"

    def _rank_of(self, run: BlockRun, recency: float) -> float:
        return (run.accesses > 1) * _LATER + recency


class TailLru(TablePolicy):
    """LRU for tail latency: evicts spare blocks first, without which a conversation still meets a threshold.

    If a conversation has L blocks and its next prompt adds Q, then L + Q - T must stay cached, so that at
    most T are computed. Cached blocks beyond these are evicted first, then the least recent.
    """

    name = "tlru"

    def __init__(
        self,
        tree: RunTree,
        capacity: int,
        *,
        seed: int = 0,
        prompt_blocks: int = 4,
        threshold_blocks: int = 8,
    ) -> None:
        super().__init__(tree, capacity, seed=seed)
        self._spare = prompt_blocks - threshold_blocks
        self._keep = np.zeros(64, dtype=np.int64)
        self._end = np.zeros(64, dtype=np.int64)  # by slot, of its run

    def touch(self, path: list[BlockRun], known: int) -> None:
        """Store how many blocks of this conversation must stay."""
        super().touch(path, known)
        if not path:
            return  # a prompt shorter than a block
        keep = max(path[-1].end + self._spare, 0)
        for run in path:
            self._keep[run.slot] = keep

    def split(self, upper: BlockRun, lower: BlockRun) -> None:
        """Both parts belong to the conversations of the whole run."""
        super().split(upper, lower)
        self._keep[upper.slot] = self._keep[lower.slot]

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Evict spare blocks, the least recent first; then as LRU."""
        removed: list[int] = []
        heap = self._sparing(count)
        while heap and len(removed) < count:
            slot = heapq.heappop(heap)[1]
            _, parent = self._cut(slot, min(self._spared(slot), count - len(removed)), removed)
            if parent is not None and self._spared(parent.slot) > 0:
                heapq.heappush(heap, (float(self._recency[parent.slot]), parent.slot))
        if len(removed) < count:
            self._take(count - len(removed), self._by_recency(), removed)
        return removed

    def _sparing(self, count: int) -> list[tuple[float, int]]:
        """The least recent leaves with spare blocks, up to `count`, as a heap of (recency, slot)."""
        used = len(self._runs)
        (slots,) = (self._leaf[:used] & (self._end[:used] > self._keep[:used])).nonzero()
        if len(slots) > count:  # each gives a block at least
            slots = slots[np.argpartition(self._recency[slots], count - 1)[:count]]
        return sorted(zip(self._recency[slots].tolist(), slots.tolist(), strict=True))

    def _spared(self, slot: int) -> int:
        run = self._runs[slot]
        return 0 if run is None else run.end - max(int(self._keep[slot]), run.start)

    def _cut(self, slot: int, count: int, removed: list[int]) -> tuple[int, BlockRun | None]:
        run = self._runs[slot]
        taken, parent = super()._cut(slot, count, removed)
        if run is not None:
            self._end[slot] = run.end
        return taken, parent

    def _enter(self, run: BlockRun) -> None:
        super()._enter(run)
        self._keep = grown(self._keep, run.slot + 1)
        self._end = grown(self._end, run.slot + 1)
        self._end[run.slot] = run.end
