"""Many blocks at once are taken by a faster way, which must decide as the plain one does."""

from __future__ import annotations

import heapq
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import EvictError
from gati.evict.cache import BlockCache
from gati.evict.index.tree import RunTree
from gati.evict.policy.keyed import Lfu
from tests.evict.strategies import long_trees


class Scored(Lfu):
    """Evicts by scores that it is given."""

    scores: np.ndarray

    def evict(self, count: int, missing: list[int]) -> list[int]:
        removed: list[int] = []
        self._take(count, self.scores, removed)
        return removed


def plain(policy: Scored, count: int) -> list[int]:
    """The best leaf again and again, with parents that become leaves: what a heap of all would give."""
    heap = [
        (-policy.scores[slot], slot) for slot in np.flatnonzero(policy._leaf[: len(policy.scores)]).tolist()
    ]
    heapq.heapify(heap)
    removed: list[int] = []
    while count > 0:
        _, slot = heapq.heappop(heap)
        taken, parent = policy._cut(slot, count, removed)
        count -= taken
        if parent is not None:
            heapq.heappush(heap, (-policy.scores[parent.slot], parent.slot))
    return removed


def filled(trace: Any) -> Scored:
    tree = RunTree()
    policy = Scored(tree, 10_000)
    cache = BlockCache(tree, 10_000, policy)
    for number, row in enumerate(trace.requests):
        cache.access(row, float(number))
    return policy


@given(long_trees, st.integers(0, 999), st.integers(9, 60), st.booleans())
@settings(max_examples=200, deadline=None)
def test_many_at_once_are_those_that_one_by_one_would_take(
    trace: Any, seed: int, count: int, locked: bool
) -> None:
    """Blocks and their order, where scores differ."""
    both = [filled(trace), filled(trace)]
    chance = random.Random(seed)
    scores = np.array(chance.sample(range(10_000), len(both[0]._runs)), dtype=np.float64)
    for policy in both:
        policy.scores = scores
        for run in list(policy.tree)[: 3 if locked else 0]:
            run.locks += 1
            policy.settle(run)
    spare = sum(len(run.ids) for run in both[0].tree) - kept(both[0])
    count = min(count, spare)
    if count == 0:
        return
    assert both[0].evict(count, []) == plain(both[1], count)
    assert sorted(map(repr, both[0].tree)) == sorted(map(repr, both[1].tree))
    assert (both[0]._leaf == both[1]._leaf).all()


def kept(policy: Scored) -> int:
    runs = set()
    for each in policy.tree:
        run = each if each.locks else None
        while run is not None and run not in runs:
            runs.add(run)
            run = run.parent
    return sum(len(run.ids) for run in runs)


@pytest.mark.parametrize("equal", [False, True])
def test_more_than_there_is_cannot_be_taken(equal: bool) -> None:
    tree = RunTree(flat=True)
    policy = Scored(tree, 100)
    cache = BlockCache(tree, 100, policy)
    cache.access(list(range(12)), 0.0)
    policy.scores = np.zeros(12) if equal else np.arange(12.0)
    with pytest.raises(EvictError, match="no block can be evicted"):
        policy.evict(13, [])
