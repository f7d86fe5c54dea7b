"""The history of recent requests: a prefix tree larger than the cache, and the features of its runs.

It stores runs of blocks as the cached tree does, but many more of them. So statistics of a run survive its
eviction, and a run is recognised if it is requested again after its eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import log2

import numpy as np
from numpy.typing import NDArray

from gati.evict.index.tree import BlockRun, RunTree

_GAPS = 4  # last intervals
_HALF_LIVES_S = (10.0, 60.0, 360.0)  # of decaying counters
_NEVER = -1.0  # for features without a value

FEATURES = (
    "request_blocks",
    "new_blocks",
    "start",
    "blocks",
    "blocks_below",
    "is_new",
    "accesses",
    "turns",
    "age",
    "children",
    *(f"gap_{number + 1}" for number in range(_GAPS)),
    *(f"counter_{half_life:g}s" for half_life in _HALF_LIVES_S),
    "parent_children",
    "parent_born",
    "parent_returned",
    "upper_born",
    "upper_returned",
    "known_gap",
    "known_blocks",
)


class RunMemory:
    """The record of one run of blocks."""

    __slots__ = ("born", "counters", "first_s", "gaps", "last_s", "returned", "sample")

    def __init__(self, now_s: float) -> None:
        self.first_s = self.last_s = now_s
        self.gaps = (_NEVER,) * _GAPS
        self.counters = [0.0] * len(_HALF_LIVES_S)  # replaced, never modified: copies share it
        self.born = 0.0  # runs added right below
        self.returned = 0.0  # of these, runs requested again
        self.sample = -1  # the sample that is waiting for the next access

    def copy(self) -> RunMemory:
        """Return a separate record for the upper part of a run that is split."""
        other = RunMemory(self.first_s)
        other.last_s, other.gaps, other.counters = self.last_s, self.gaps, self.counters
        other.sample = self.sample
        return other

    def used(self, now_s: float) -> None:
        """Record an access."""
        gap = now_s - self.last_s
        self.gaps = (log2(1.0 + gap), *self.gaps[:-1])
        self.counters = [
            1.0 + count * 2.0 ** (-gap / half_life)
            for count, half_life in zip(self.counters, _HALF_LIVES_S, strict=True)
        ]
        self.last_s = now_s


class Observer:
    """Callbacks for the samples of a history. This base class ignores them."""

    def returned(self, sample: int, now_s: float) -> None:
        """The blocks of `sample` were requested again."""

    def forgotten(self, sample: int, now_s: float) -> None:
        """Whether the blocks of `sample` are requested again will remain unknown."""

    def copied(self, sample: int) -> int:
        """A run was split: return a sample for its upper part."""
        return sample

    def taken(self, rows: NDArray[np.float32], now_s: float) -> Sequence[int]:
        """Runs with these features [n, F] were requested now; return the number of a new sample for each."""
        return [-1] * len(rows)


class RequestHistory:
    """Stores at most `capacity_blocks` blocks of past requests; the least recent are forgotten first."""

    def __init__(self, capacity_blocks: int, observer: Observer, *, flat: bool = False) -> None:
        self._capacity = capacity_blocks
        self._observer = observer
        self._flat = flat
        self._tree = RunTree(flat=flat)
        self._order: OrderedDict[BlockRun, RunMemory] = (
            OrderedDict()
        )  # the least recent first, children before parents

    def access(self, ids: list[int], request: int, now_s: float) -> tuple[list[int], NDArray[np.float32]]:
        """Add a request; return the ends of the runs of its path and their features [n, F], from the root."""
        path, matched = self._match(ids)
        known_gap = log2(1.0 + (now_s - self._order[path[-1]].last_s)) if path else _NEVER
        above: RunMemory | None = None
        for run in path:
            memory = self._order[run]
            if above is not None and run.accesses == 1:
                above.returned += 1.0
            self._again(run, memory, now_s)
            above = None if self._flat else memory
        if matched < len(ids):
            path = self._load(ids, path, matched, request, now_s)
        if self._flat:
            heads = self._tree.heads
            path = [heads[block] for block in ids]
            known_gap = _NEVER
        memories = [self._order[run] for run in path]
        for run in reversed(path):
            self._order.move_to_end(run)
        rows = _features(path, memories, matched, len(ids), known_gap, now_s, flat=self._flat)
        for memory, sample in zip(memories, self._observer.taken(rows, now_s), strict=True):
            memory.sample = sample
        ends = list(range(1, len(path) + 1)) if self._flat else [run.start + len(run.ids) for run in path]
        self._forget(now_s)
        return ends, rows

    def _match(self, ids: list[int]) -> tuple[list[BlockRun], int]:
        path, matched, upper, lower = self._tree.match(ids)
        if upper is not None and lower is not None:
            memory = self._order[upper] = self._order[lower].copy()
            if memory.sample >= 0:
                memory.sample = self._observer.copied(memory.sample)
        return path, matched

    def _again(self, run: BlockRun, memory: RunMemory, now_s: float) -> None:
        memory.used(now_s)
        run.accesses += 1
        if memory.sample >= 0:
            self._observer.returned(memory.sample, now_s)

    def _load(
        self, ids: list[int], path: list[BlockRun], matched: int, request: int, now_s: float
    ) -> list[BlockRun]:
        """Store the new blocks of a request; in a tree, its last block becomes a separate run.

        That block is seldom full, so a continuation of the request usually has another block in its place.
        """
        tree, count = self._tree, len(ids)
        added = tree.extend(path, tree.missing(ids, matched), request, (count - 1, count))
        for run in added:
            run.accesses = 1
            if run.parent is not None:
                self._order[run.parent].born += 1.0
            self._order[run] = RunMemory(now_s)
        return path + added

    def _forget(self, now_s: float) -> None:
        tree, order = self._tree, self._order
        while tree.used > self._capacity:
            run, memory = order.popitem(last=False)
            if memory.sample >= 0:
                self._observer.forgotten(memory.sample, now_s)
            tree.trim(run, len(run.ids))


def _features(
    path: list[BlockRun],
    memories: list[RunMemory],
    matched: int,
    count: int,
    known_gap: float,
    now_s: float,
    *,
    flat: bool,
) -> NDArray[np.float32]:
    rows = []
    parent = upper = RunMemory(now_s)
    parent_children = 0
    new = float(count - matched)
    for run, memory in zip(path, memories, strict=True):
        length = len(run.ids)
        below = float(count - run.start - length)
        rows.append(
            [
                float(count),
                new,
                float(run.start),
                float(length),
                below,
                float(run.accesses == 1),
                float(run.accesses),
                float(run.turns),
                log2(1.0 + (now_s - memory.first_s)),  # not `now_s` plus 1, which may be rounded
                float(run.children),
                *memory.gaps,
                *memory.counters,
                float(parent_children),
                parent.born,
                _share(parent),
                upper.born,
                _share(upper),
                known_gap,
                float(matched),
            ]
        )
        if not flat:
            upper, parent, parent_children = parent, memory, run.children
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(FEATURES))


def _share(memory: RunMemory) -> float:
    """Share of the runs added below that were requested again, shrunk towards 1/3 if there are few."""
    return (memory.returned + 1.0) / (memory.born + 3.0)
