"""Policies that ask whether conversations go on: LPC, the same with certainty, LARU with its keys."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict

import numpy as np

from gati.errors import EvictError
from gati.evict.index.tree import BlockRun, RunTree
from gati.evict.policy.base import Floats, TablePolicy
from gati.evict.policy.guard import Gati
from gati.evict.predict.base import grown
from gati.evict.predict.conversing import ContinuationSource

_SPARE_TIPS = 1024


class _Tip:
    """The last request of a conversation: where it ended, and its key. Dead once a longer one came."""

    __slots__ = ("key", "live")

    def __init__(self, key: float) -> None:
        self.key = key
        self.live = True


class ConversationKeys:
    """The key of each run: the largest of the conversations that went through it since it was loaded.

    A conversation is known by the last block of its last request. A request through that block goes on with
    it and replaces its key, which may become smaller. All runs that this concerns lie on the new request's
    path. Of more than four conversations a block the oldest are forgotten; what they left behind keeps
    their keys until it is used again.
    """

    def __init__(self, capacity: int) -> None:
        self._most = 4 * capacity + _SPARE_TIPS
        self._tips: OrderedDict[int, _Tip] = OrderedDict()  # by last block
        self._through: list[list[tuple[float, int, _Tip]]] = []  # heaps by slot: minus key, order, tip
        self._tidy: list[int] = []  # lengths of these when the dead were last removed
        self._order = itertools.count()
        self._keys = np.full(64, -np.inf)

    def keys(self, count: int) -> Floats:
        """Of slots 0..count-1, [count]."""
        return self._keys[:count]

    def enter(self, slot: int) -> None:
        """A run was loaded into a slot."""
        while slot >= len(self._through):
            self._through.append([])
            self._tidy.append(0)
        self._keys = grown(self._keys, slot + 1)
        self._through[slot] = []
        self._tidy[slot] = 0
        self._keys[slot] = -np.inf

    def copy(self, source: int, target: int) -> None:
        """A run was split: the same conversations went through both parts."""
        self._through[target] = self._through[source].copy()
        self._tidy[target] = self._tidy[source]
        self._keys[target] = self._keys[source]

    def served(self, ids: list[int], path: list[BlockRun], key: float) -> None:
        """A request of that key was served by `path`."""
        tips = self._tips
        if not ids:
            return
        for block in ids:
            former = tips.pop(block, None)
            if former is not None:
                former.live = False
        tip = tips[ids[-1]] = _Tip(key)
        if len(tips) > self._most:
            tips.popitem(last=False)[1].live = False
        entry = (-key, next(self._order), tip)
        for run in path:
            self._add(run.slot, entry)

    def _add(self, slot: int, entry: tuple[float, int, _Tip]) -> None:
        heap = self._through[slot]
        heapq.heappush(heap, entry)
        if len(heap) > 2 * self._tidy[slot] + 16:
            heap = self._through[slot] = [each for each in heap if each[2].live]
            heapq.heapify(heap)
            self._tidy[slot] = len(heap)
        while not heap[0][2].live:
            heapq.heappop(heap)
        self._keys[slot] = -heap[0][0]


class _Conversing(TablePolicy):
    """Keys runs by how likely their conversations go on."""

    converses = True
    tree_only = True
    _ids: list[int]

    def _listen(self, source: ContinuationSource, capacity: int) -> None:
        self._source, self._ids = source, []
        self._book = ConversationKeys(capacity)

    def begin(self, ids: list[int], hits: int, time_s: float) -> None:
        """Note which conversation it is."""
        super().begin(ids, hits, time_s)
        self._ids = ids

    def split(self, upper: BlockRun, lower: BlockRun) -> None:
        """The same conversations went through both."""
        super().split(upper, lower)
        self._book.copy(lower.slot, upper.slot)

    def touch(self, path: list[BlockRun], known: int) -> None:
        """Key the path anew."""
        super().touch(path, known)
        self._book.served(self._ids, path, self._source.key)

    def _enter(self, run: BlockRun) -> None:
        super()._enter(run)
        self._book.enter(run.slot)


class Lpc(_Conversing):
    """The leaf whose conversations are least likely to go on, decayed by silence (LPC); ties by recency.

    A heap of (key, recency, slot), in which what is no longer so is skipped: a run's recency is its own, and
    its key changes only when that does.
    """

    name = "lpc"
    predicts = True

    def __init__(self, tree: RunTree, capacity: int, predictor: ContinuationSource, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, seed=seed)
        self._listen(predictor, capacity)
        self._heap: list[tuple[float, float, int]] = []

    def touch(self, path: list[BlockRun], known: int) -> None:
        """Key the path anew."""
        super().touch(path, known)
        for run in path:
            self._offer(run.slot)

    def settle(self, run: BlockRun) -> None:
        """A run that may go again is a candidate again."""
        before = bool(self._leaf[run.slot])
        super().settle(run)
        if not before:
            self._offer(run.slot)

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """The smallest keys."""
        removed: list[int] = []
        while len(removed) < count:
            slot = self._lowest()
            self._cut(slot, count - len(removed), removed)
            self._offer(slot)  # unless it has gone, which leaves no leaf there
        return removed

    def _lowest(self) -> int:
        """The slot of the leaf to go next. Raises EvictError where there is none."""
        heap, keys = self._heap, self._book.keys(len(self._runs))
        while heap:
            key, recency, slot = heapq.heappop(heap)
            if self._leaf[slot] and keys[slot] == key and self._recency[slot] == recency:
                return slot
        raise EvictError("no block can be evicted: all are locked by active requests")

    def _offer(self, slot: int) -> None:
        if not self._leaf[slot]:
            return
        heap, keys = self._heap, self._book.keys(len(self._runs))
        heapq.heappush(heap, (float(keys[slot]), float(self._recency[slot]), slot))
        if len(heap) > 4 * len(self._runs) + 64:
            slots = np.flatnonzero(self._leaf[: len(self._runs)])
            rows = zip(keys[slots].tolist(), self._recency[slots].tolist(), slots.tolist(), strict=True)
            self._heap = list(rows)
            heapq.heapify(self._heap)

    def _enter(self, run: BlockRun) -> None:
        super()._enter(run)
        self._leaf[run.slot] = False


class LpcOracle(Lpc):
    """LPC that knows whether conversations go on: those that do not go first, then the least recent."""

    name = "lpc-oracle"


class LaruLpc(_Conversing, Gati):
    """LARU that takes minus the keys of LPC as next uses, with the guard of `gati`.

    Without the guard, a catch halves the choice for its phase only, and in small caches inverted
    probabilities cost up to three points of the hit rate.
    """

    name = "laru+lpc"

    def __init__(self, tree: RunTree, capacity: int, predictor: ContinuationSource, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, predictor, seed=seed)
        self._listen(predictor, capacity)

    def _predicted(self) -> Floats:
        return -self._book.keys(len(self._runs))
