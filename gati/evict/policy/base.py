"""The policy interface, and a common base: tables over the leaves of the cached tree."""

from __future__ import annotations

import heapq
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.index.tree import NO_BLOCKS, BlockRun, RunTree
from gati.evict.predict.base import Predictor, grown

_log = logging.getLogger("gati.evict")

Floats = NDArray[np.float64]
_LEAST = -1e300
ALL_LOCKED = "no block can be evicted: all are locked by active requests"
_FEW = 8  # up to this many blocks, a few leaves with high scores are found faster than all are ranked
_GROUPS = 256  # of slots, whose highest scores are compared first


class EvictionPolicy(ABC):
    """Decides which blocks a cache evicts. The cache calls `begin`, `evict`, `touch` for every request."""

    name: ClassVar[str]
    predicts: ClassVar[bool] = False  # whether it uses a predictor
    converses: ClassVar[bool] = (
        False  # whether it predicts continuations of conversations, not reuse of blocks
    )
    foresees: ClassVar[bool] = False  # whether it needs a whole trace in advance
    tree_only: ClassVar[bool] = False  # whether it needs requests to be paths
    flat_only: ClassVar[bool] = False  # whether it supports only blocks without parents
    weighs_costs: ClassVar[bool] = False  # whether blocks may cost different times to compute

    def __init__(self, tree: RunTree, capacity: int, *, seed: int = 0) -> None:
        self.tree = tree
        self.capacity = capacity
        self.predictor: Predictor | None = None  # to which the cache passes its requests

    def begin(self, ids: list[int], hits: int, time_s: float) -> None:  # noqa: B027
        """A request, truncated to the capacity, has `hits` cached blocks. Nothing is loaded yet."""

    def resume(self, ids: list[int], held: list[int]) -> None:  # noqa: B027
        """A request that `begin` has counted goes on with the path `ids`, of which `held` are cached now."""

    def limit(self, capacity: int) -> None:  # noqa: B027
        """From now on, the cache may hold so many blocks; at most the capacity it was made with."""

    def split(self, upper: BlockRun, lower: BlockRun) -> None:  # noqa: B027
        """A run was split in two."""

    @abstractmethod
    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Remove exactly `count` blocks, to make room for the last `count` of `missing`; return them.

        Raises EvictError, with nothing changed, if locked blocks and their ancestors leave fewer to remove.
        """

    @abstractmethod
    def touch(self, path: list[BlockRun], known: int) -> None:
        """The request is served by these runs, from the root down; the first `known` were cached."""

    def settle(self, run: BlockRun) -> None:  # noqa: B027
        """A run was locked or unlocked, or stopped being a leaf."""

    @abstractmethod
    def drop(self, run: BlockRun, count: int) -> list[int]:
        """Remove the last `count` blocks of an unlocked leaf that the policy did not choose; return them."""

    def figures(self) -> Mapping[str, Any]:
        """The policy's counts, as JSON values."""
        return {}


class TablePolicy(EvictionPolicy):
    """A policy that ranks leaves. Arrays indexed by slot say whether a run is evictable, and its last use.

    Recency numbers grow with every access, children before parents. So they are unique, and LRU evicts the
    leaf with the smallest. `_queue` has them for leaves only, and infinity for other slots.
    """

    def __init__(self, tree: RunTree, capacity: int, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, seed=seed)
        self._runs: list[BlockRun | None] = []
        self._leaf = np.zeros(64, dtype=bool)
        self._recency = np.zeros(64, dtype=np.float64)
        self._queue = np.zeros(64, dtype=np.float64)
        self._clock = 0

    def split(self, upper: BlockRun, lower: BlockRun) -> None:
        """The upper part was last used together with the whole run."""
        self._enter(upper)
        self._recency[upper.slot] = self._recency[lower.slot]
        self.settle(upper)
        self.settle(lower)

    def touch(self, path: list[BlockRun], known: int) -> None:
        """Renumber the path, the deepest run first."""
        for run in path[known:]:
            self._enter(run)
        recency, clock = self._recency, self._clock
        for run in reversed(path):
            clock += 1
            recency[run.slot] = clock
        self._clock = clock
        for run in path if self.tree.flat else path[max(known - 1, 0) :]:  # in a tree, others have children
            self.settle(run)

    def settle(self, run: BlockRun) -> None:
        """Record whether a run may be evicted."""
        slot = run.slot
        leaf = self._leaf[slot] = run.children == 0 and run.locks == 0
        self._queue[slot] = self._recency[slot] if leaf else np.inf

    def drop(self, run: BlockRun, count: int) -> list[int]:
        """Remove the blocks without counting this as a mistake of the predictor."""
        self.settle(run)
        removed: list[int] = []
        self._cut(run.slot, count, removed)
        return removed

    def _enter(self, run: BlockRun) -> None:
        slot = run.slot
        if slot == len(self._runs):
            self._runs.append(run)
            self._leaf = grown(self._leaf, slot + 1)
            self._recency = grown(self._recency, slot + 1)
            self._queue = grown(self._queue, slot + 1)
        else:
            self._runs[slot] = run
        self._queue[slot] = np.inf

    def _take(self, count: int, scores: Floats, removed: list[int], *, among: Floats | None = None) -> None:
        """Move `count` blocks of the leaves with the highest scores, [slots], to `removed`.

        `among` are the scores of leaves if they are known, as from `_of_leaves`.
        """
        if count > _FEW:
            self._take_many(count, scores, removed)
            return
        among = self._of_leaves(scores) if among is None else among
        (slots,) = (among >= self._least_of(among, count)).nonzero()
        heap = [self._entry(scores, slot) for slot in slots.tolist() if self._leaf[slot]]
        heapq.heapify(heap)
        self._take_heap(count, scores, heap, removed)

    def _of_leaves(self, scores: Floats) -> Floats:
        """The scores [slots], with minus infinity where no leaf is."""
        return np.where(self._leaf[: len(scores)], scores, -np.inf)

    def _least_of(self, among: Floats, count: int) -> float:
        """A score that at least `count` leaves reach, if there are so many, and few more.

        Of many slots, it is the `count`-th of the best per group. Slots of a group are `_GROUPS` apart: runs
        loaded together have adjacent slots and similar scores.
        """
        rows = len(among) // _GROUPS
        if rows > 1:
            among = np.maximum.reduce(among[: rows * _GROUPS].reshape(rows, _GROUPS))
        if not 0 < count < len(among):
            return -np.inf
        place = len(among) - count
        return float(np.partition(among, place)[place])

    def _best(self, among: Floats) -> int:
        """The slot with the highest score; of several, the one that LRU evicts first."""
        slot = int(among.argmax())
        (ties,) = (among == among[slot]).nonzero()
        return slot if len(ties) == 1 else int(ties[self._recency[ties].argmin()])

    def _take_many(self, count: int, scores: Floats, removed: list[int]) -> None:
        (slots,) = self._leaf[: len(scores)].nonzero()
        values = -scores[slots]
        if len(slots) > count:
            best = values <= np.partition(values, count - 1)[count - 1]
            slots, values = slots[best], values[best]
        order = values.argsort()
        values, slots = values[order], slots[order]
        if (values[1:] == values[:-1]).any():
            order = np.lexsort((self._recency[slots], values))
            slots = slots[order]  # `values` are sorted
            ranked = zip(values.tolist(), self._recency[slots].tolist(), slots.tolist(), strict=True)
            self._take_heap(count, scores, list(ranked), removed)
        else:
            self._take_ranked(count, scores, values.tolist(), slots.tolist(), removed)

    def _take_heap(
        self, count: int, scores: Floats, heap: list[tuple[float, float, int]], removed: list[int]
    ) -> None:
        while count > 0:
            if not heap:
                raise EvictError(ALL_LOCKED)
            slot = heapq.heappop(heap)[2]
            taken, parent = self._cut(slot, count, removed)
            count -= taken
            if parent is not None:
                heapq.heappush(heap, self._entry(scores, parent.slot))

    def _entry(self, scores: Floats, slot: int) -> tuple[float, float, int]:
        """A heap entry: the highest score first, then the least recent."""
        return -float(scores[slot]), float(self._recency[slot]), slot

    def _take_ranked(
        self, count: int, scores: Floats, values: list[float], slots: list[int], removed: list[int]
    ) -> None:
        """Remove the same blocks as `_take_heap` in half the time, if no two values are equal.

        `slots` are visited in order of their `values`; only parents that become leaves go through a heap.
        """
        runs, leaf, tree = self._runs, self._leaf, self.tree
        heads, free = tree.heads, tree.free
        recency = self._recency
        parents: list[tuple[float, float, int]] = []
        gone: list[int] = []
        before = len(removed)
        last = len(slots)
        at = slot = 0
        while count > 0:
            if parents and (at == last or parents[0][:2] < (values[at], recency[slots[at]])):
                slot = heapq.heappop(parents)[2]
            elif at < last:
                slot = slots[at]
                at += 1
            else:
                break
            run = runs[slot]
            if run is None:
                break
            ids = run.ids
            if len(ids) > count:
                break
            # `RunTree.drop_leaf`, inlined: thousands of calls would take longer than the work itself.
            removed += ids
            count -= len(ids)
            del heads[ids[0]]
            run.ids = NO_BLOCKS
            runs[slot] = None
            gone.append(slot)
            parent = run.parent
            if parent is None:
                continue
            parent.children -= 1
            if parent.children == 0:
                self.settle(parent)
                if leaf[parent.slot]:
                    heapq.heappush(parents, self._entry(scores, parent.slot))
        tree.used -= len(removed) - before
        free += gone
        leaf[gone] = False
        self._queue[gone] = np.inf
        if count > 0:
            self._cut(slot, count, removed)  # a part of the last leaf; raises EvictError if none is left

    def _cut(self, slot: int, count: int, removed: list[int]) -> tuple[int, BlockRun | None]:
        """Remove up to `count` blocks of a leaf; return their number, and its parent if now evictable."""
        run = self._runs[slot]
        if run is None or not self._leaf[slot]:
            raise EvictError(ALL_LOCKED)
        taken = min(count, len(run.ids))
        whole = taken == len(run.ids)
        ids, parent = self.tree.trim(run, taken)
        removed += ids
        if not whole:
            return taken, None
        self._leaf[slot] = False
        self._queue[slot] = np.inf
        self._runs[slot] = None
        if parent is None:
            return taken, None
        self.settle(parent)
        return taken, parent if self._leaf[parent.slot] else None

    def _by_recency(self) -> Floats:
        """Scores that are highest for the leaf LRU evicts, [slots]."""
        return -self._recency[: len(self._runs)]


class PredictingPolicy(TablePolicy):
    """A table policy with predictions. If these fail or are NaN, LRU decides, and the failure is counted.

    The first failure of each type is logged with its traceback.
    """

    predicts = True
    predictor: Predictor

    def __init__(self, tree: RunTree, capacity: int, predictor: Predictor, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, seed=seed)
        self.predictor = predictor
        self._failures = 0
        self._told: set[type[Exception]] = set()  # kinds of failures that were logged

    def _predicted(self) -> Floats:
        """Scores [slots] of which the highest is evicted."""
        scores = self._next_uses()
        return self._by_recency() if scores is None else scores

    def _next_uses(self) -> Floats | None:
        """What the predictor says, [slots]; None if it failed."""
        try:
            scores = np.asarray(self.predictor.scores(len(self._runs)), dtype=np.float64)
        except Exception as error:  # predictors may be user code; errors only lead to worse decisions
            self._failures += 1
            if type(error) not in self._told:
                self._told.add(type(error))
                _log.warning("the predictor failed, so LRU decides: %s", error, exc_info=True)
            return None
        if np.minimum.reduce(scores, initial=np.inf) >= _LEAST:  # also False if any is NaN
            return scores
        if np.isnan(scores[self._leaf[: len(scores)]]).any():
            self._failures += 1
            return None
        return np.maximum(scores, _LEAST)  # minus infinity marks what cannot be evicted

    def figures(self) -> Mapping[str, Any]:
        """Number of predictions that could not be used."""
        return {"failures": self._failures}
