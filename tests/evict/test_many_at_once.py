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
    cache = BlockCache(policy)
    for number, row in enumerate(trace.requests):
        cache.access(row, float(number))
    return policy


@pytest.mark.slow
@given(long_trees, st.integers(0, 999), st.integers(9, 60), st.booleans())
@settings(max_examples=100, deadline=None)
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
    cache = BlockCache(policy)
    cache.access(list(range(12)), 0.0)
    policy.scores = np.zeros(12) if equal else np.arange(12.0)
    with pytest.raises(EvictError, match="no block can be evicted"):
        policy.evict(13, [])


@pytest.mark.parametrize("leaves", [5, 511, 512, 3_000])
@pytest.mark.parametrize("different", [1, 40, 10_000])
def test_a_few_are_those_with_the_highest_scores_then_the_oldest(leaves: int, different: int) -> None:
    """However many leaves there are, some of them locked, and however many scores are equal."""
    chance = random.Random(leaves + different)
    tree = RunTree(flat=True)
    policy = Scored(tree, leaves)
    cache = BlockCache(policy)
    for block in chance.sample(range(leaves), leaves):
        cache.access([block], 0.0)
    policy.scores = np.array([chance.randrange(different) for _ in range(leaves)], dtype=np.float64)
    cache.match(chance.sample(range(leaves), leaves // 3))
    left = sorted(
        (-policy.scores[run.slot], policy._recency[run.slot], run.ids[0]) for run in tree if not run.locks
    )
    for count in (0, 1, 2, 3, 8, 8, 8):
        count = min(count, len(left))
        assert policy.evict(count, []) == [block for _, _, block in left[:count]]
        left = left[count:]


def test_the_queue_of_lru_has_every_leaf_and_nothing_else() -> None:
    for flat in (False, True):
        chance = random.Random(7)
        tree = RunTree(flat=flat)
        policy = Lfu(tree, 30)
        cache = BlockCache(policy)
        open_handles = []
        for number in range(400):
            start = chance.randrange(40)
            row = list(range(100 * start, 100 * start + chance.randint(1, 8)))
            if number % 3:
                cache.access(row, float(number))
            else:
                open_handles.append(cache.match(row))
            if len(open_handles) > 2:
                cache.release(open_handles.pop(0))
            queue = policy._queue[: len(policy._runs)]
            leaves = {run.slot for run in tree if not run.children and not run.locks}
            assert set(np.flatnonzero(queue < np.inf).tolist()) == leaves
            assert all(queue[slot] == policy._recency[slot] for slot in leaves)
