"""Policies that predict whether conversations continue: LPC, its oracle, and LARU with its keys."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict

import numpy as np

from gati.errors import EvictError
from gati.evict.index.tree import BlockRun, RunTree
from gati.evict.policy.base import ALL_LOCKED, Floats, TablePolicy
from gati.evict.policy.guard import Gati
from gati.evict.predict.base import grown
from gati.evict.predict.conversing import ContinuationSource

_SPARE_TIPS = 1024


class _Tip:
    """The last request of a conversation, with its key. Dead once a longer request has replaced it."""

    __slots__ = ("key", "live")

    def __init__(self, key: float) -> None:
        self.key = key
        self.live = True


class ConversationKeys:
    """The key of each run: the largest of all conversations that passed through it since it was loaded.

    A conversation is identified by the last block of its last request. A request through that block continues
    it and replaces its key, which may become smaller. All affected runs lie on the new request's path. Beyond
    about four conversations per block of capacity, the oldest are forgotten; their runs keep the keys until
    they are used again.
    """

    def __init__(self, capacity: int) -> None:
        self._most = 4 * capacity + _SPARE_TIPS
        self._tips: OrderedDict[int, _Tip] = OrderedDict()  # by last block
        self._through: list[list[tuple[float, int, _Tip]]] = []  # heaps by slot: minus key, order, tip
        self._tidy: list[int] = []  # their lengths when dead entries were last removed
        self._order = itertools.count()
        self._keys = np.full(64, -np.inf)

    def keys(self, count: int) -> Floats:
        """Keys of slots 0..count-1, [count]."""
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
        """A run was split: the same conversations passed through both parts."""
        self._through[target] = self._through[source].copy()
        self._tidy[target] = self._tidy[source]
        self._keys[target] = self._keys[source]

    def of(self, ids: list[int], otherwise: float) -> float:
        """The key of the conversation that a path continues, or another if it is unknown."""
        return next((self._tips[block].key for block in reversed(ids) if block in self._tips), otherwise)

    def served(self, ids: list[int], path: list[BlockRun], key: float) -> None:
        """A request with that key was served by `path`."""
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
    """Ranks runs by the probability that their conversations continue."""

    converses = True
    tree_only = True
    _ids: list[int]
    _key: float

    def _listen(self, source: ContinuationSource, capacity: int) -> None:
        self.predictor = self._source = source
        self._ids, self._key = [], 0.0
        self._book = ConversationKeys(capacity)

    def begin(self, ids: list[int], hits: int, time_s: float) -> None:
        """Store the request's blocks and key for `touch`."""
        super().begin(ids, hits, time_s)
        self._ids, self._key = ids, self._source.key

    def resume(self, ids: list[int], held: list[int]) -> None:
        """Others may have begun in the meantime: this one keeps the key it began with."""
        super().resume(ids, held)
        self._ids, self._key = ids, self._book.of(ids, self._source.key)

    def split(self, upper: BlockRun, lower: BlockRun) -> None:
        """The same conversations passed through both parts."""
        super().split(upper, lower)
        self._book.copy(lower.slot, upper.slot)

    def touch(self, path: list[BlockRun], known: int) -> None:
        """Update the keys of the path."""
        super().touch(path, known)
        self._book.served(self._ids, path, self._key)

    def _enter(self, run: BlockRun) -> None:
        super()._enter(run)
        self._book.enter(run.slot)


class Lpc(_Conversing):
    """Evicts the leaf whose conversations are least likely to continue, decayed by silence (LPC).

    Ties go to the least recent. It uses a heap of (key, recency, slot) and skips outdated entries: recency is
    unique to a run, and its key changes only together with its recency.
    """

    name = "lpc"
    predicts = True

    def __init__(self, tree: RunTree, capacity: int, predictor: ContinuationSource, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, seed=seed)
        self._listen(predictor, capacity)
        self._heap: list[tuple[float, float, int]] = []

    def touch(self, path: list[BlockRun], known: int) -> None:
        """Update the keys of the path."""
        super().touch(path, known)
        for run in path:
            self._offer(run.slot)

    def settle(self, run: BlockRun) -> None:
        """A run that becomes evictable is a candidate again."""
        before = bool(self._leaf[run.slot])
        super().settle(run)
        if not before:
            self._offer(run.slot)

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Evict the leaves of the smallest keys."""
        removed: list[int] = []
        while len(removed) < count:
            slot = self._lowest()
            self._cut(slot, count - len(removed), removed)
            self._offer(slot)  # does nothing if the whole leaf was removed
        return removed

    def _lowest(self) -> int:
        """The slot of the leaf to evict next. Raises EvictError if there is none."""
        heap, keys = self._heap, self._book.keys(len(self._runs))
        while heap:
            key, recency, slot = heapq.heappop(heap)
            if self._leaf[slot] and keys[slot] == key and self._recency[slot] == recency:
                return slot
        raise EvictError(ALL_LOCKED)

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
    """LPC that knows which conversations continue: evicts the others first, then the least recent."""

    name = "lpc-oracle"
    foresees = True


class LaruLpc(_Conversing, Gati):
    """LARU with the guard of `gati`, which uses the negated keys of LPC as predicted next uses.

    Without the guard, a caught prediction halves the candidates only for its phase; in small caches, inverted
    probabilities then cost up to three points of the hit rate.
    """

    name = "laru+lpc"
    weighs_costs = False  # its keys are not times

    def __init__(self, tree: RunTree, capacity: int, predictor: ContinuationSource, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, predictor, seed=seed)
        self._listen(predictor, capacity)

    def _next_uses(self) -> Floats:
        return -self._book.keys(len(self._runs))
