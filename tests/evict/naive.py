"""Eviction block by block and without any cleverness: what the fast code is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from typing import Any

import numpy as np

from gati.evict.cache import BlockCache
from gati.evict.policy.registry import make_policy
from gati.evict.predict.base import grown
from gati.evict.predict.named import Maker
from gati.evict.trace.records import Trace, make_trace

Request = tuple[int, ...]
Path = tuple[int, ...]


def build(name: str, capacity: int, maker: Maker | None = None, **options: Any) -> BlockCache:
    return BlockCache(make_policy(name, capacity, maker, **options))


def tree_trace(requests: Sequence[Sequence[int]]) -> Trace:
    """Requests as paths of symbols; each block is named by the whole path to it."""
    return make_trace([["/".join(map(str, row[: end + 1])) for end in range(len(row))] for row in requests])


def flat_trace(items: Sequence[int]) -> Trace:
    return make_trace([[item] for item in items], kind="flat")


class NaiveTree:
    """A set of cached blocks, each with its parent and when it was used; everything is searched."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.parent: dict[int, int | None] = {}
        self.used: dict[int, tuple[int, int]] = {}  # block: (request, minus depth): what LRU goes by
        self.loaded: dict[int, tuple[int, int]] = {}
        self.counts: dict[int, int] = {}
        self.depth: dict[int, int] = {}

    def hits(self, ids: Sequence[int]) -> int:
        count = 0
        while count < len(ids) and ids[count] in self.parent:
            count += 1
        return count

    def leaves(self, locked: Sequence[int]) -> list[int]:
        above = {parent for parent in self.parent.values() if parent is not None}
        return [block for block in self.parent if block not in above and block not in locked]

    def access(
        self, ids: Sequence[int], number: int, choose: Callable[[list[int], int], int]
    ) -> tuple[int, list[int]]:
        """Serve a request; `choose` is given the leaves and the block that needs room."""
        ids = ids[: self.capacity]
        hits = self.hits(ids)
        evicted = []
        for place in range(hits, len(ids)):
            if len(self.parent) >= self.capacity:
                victim = choose(self.leaves(ids), ids[place])
                del self.parent[victim]
                evicted.append(victim)
            self.parent[ids[place]] = ids[place - 1] if place else None
            self.loaded[ids[place]] = (number, place)
            self.counts[ids[place]] = 0
            self.depth[ids[place]] = place
        for place, block in enumerate(ids):
            self.used[block] = (number, -place)
            self.counts[block] += 1
        return hits, evicted

    def lru(self, leaves: list[int]) -> int:
        return min(leaves, key=lambda block: self.used[block])


def naive_laru(trace: Trace, capacity: int, predicted: Callable[[int, int], float]) -> tuple[list[int], int]:
    """LARU as EVICTION writes it, block by block: hits of each request, and how many were caught.

    `predicted(request, block)` is what was predicted for a block when that request used it.
    """
    tree = NaiveTree(capacity)
    requested: set[int] = set()
    evicted: set[int] = set()
    share, caught, hits = 1.0, 0, []
    said: dict[int, float] = {}

    def choose(leaves: list[int], block: int) -> int:
        nonlocal share, caught
        if block in evicted:
            share /= 2
            caught += 1
            return tree.lru(leaves)
        oldest = sorted(leaves, key=lambda each: tree.used[each])[: max(int(share * len(leaves)), 1)]
        victim = max(oldest, key=lambda each: said[each])
        evicted.add(victim)
        return victim

    for number, row in enumerate(trace.requests):
        row = row[:capacity]
        if len(requested | set(row)) > capacity:
            requested, evicted, share = set(), set(), 1.0
        requested |= set(row)
        hits.append(tree.access(row, number, choose)[0])
        for block in row:
            said[block] = predicted(number, block)
    return hits, caught


def naive_next_use(trace: Trace, number: int, block: int) -> float:
    """The next request after `number` that holds the block."""
    later = (each for each in range(number + 1, len(trace)) if block in trace.requests[each])
    return next(later, inf)


def best_leaf_hits(trace: Trace, capacity: int) -> int:
    """The most hits that any choice of leaves can give: every choice is tried."""
    requests = [tuple(row[:capacity]) for row in trace.requests]
    parent: dict[int, int | None] = {}
    for row in requests:
        for place, block in enumerate(row):
            parent[block] = row[place - 1] if place else None

    @cache
    def best(number: int, held: frozenset[int]) -> int:
        if number == len(requests):
            return 0
        row = requests[number]
        hits = 0
        while hits < len(row) and row[hits] in held:
            hits += 1
        states = {held}
        for place in range(hits, len(row)):
            following: set[frozenset[int]] = set()
            for state in states:
                if len(state) < capacity:
                    following.add(state | {row[place]})
                    continue
                above = {parent[block] for block in state}
                leaves = [block for block in state if block not in above and block not in row]
                following.update((state - {leaf}) | {row[place]} for leaf in leaves)
            states = following
        return hits + max(best(number + 1, state) for state in states)

    return best(0, frozenset())


class Scripted:
    """A predictor for tests: predictions of any kind, one stretch for each block of a path, or fewer."""

    def __init__(self, said: Callable[[int, int], float], *, stretch: int = 1) -> None:
        self._said = said
        self._stretch = stretch
        self._now: list[float] = []
        self._kept = np.zeros(64)

    def observe(self, ids: list[int], request: int, time_s: float) -> list[int]:
        ends = [*range(self._stretch, len(ids), self._stretch), len(ids)]
        self._now = [self._said(request, ids[end - 1]) for end in ends]
        return ends

    def assign(self, slot: int, stretch: int) -> None:
        self._kept = grown(self._kept, slot + 1)
        self._kept[slot] = self._now[stretch]

    def copy(self, source: int, target: int) -> None:
        self._kept = grown(self._kept, max(source, target) + 1)
        self._kept[target] = self._kept[source]

    def scores(self, count: int) -> Any:
        self._kept = grown(self._kept, count)
        return self._kept[:count].copy()

    def figures(self) -> dict[str, Any]:
        return {}
