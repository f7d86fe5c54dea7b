"""The guard's promise on hostile input, and that these tests would notice if it were not kept."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gati.evict.policy.guard import Gati, ShadowLru, bound
from gati.evict.replays.replay import build
from gati.evict.trace.records import Trace
from tests.evict.naive import NaiveTree, Scripted, flat_trace, naive_next_use, tree_trace


def hostile_instance(seed: int, *, requests: int = 150) -> tuple[Trace, int, Callable[[int, int], float]]:
    """A random trace whose popular blocks move, a capacity, and predictions that are mostly wrong."""
    chance = random.Random(seed)
    capacity = chance.choice((2, 4, 8, 16, 24))
    if seed % 3 == 0:
        spread = chance.choice((0.5, 1.0, 1.6)) * capacity
        trace = flat_trace(
            [int(chance.expovariate(1.0 / spread)) + number // 100 for number in range(requests)]
        )
    else:
        width, deepest = chance.randint(2, 4), chance.randint(2, 8)
        rows = [[chance.randrange(width) for _ in range(chance.randint(1, deepest))] for _ in range(requests)]
        trace = tree_trace(rows)
    truth: dict[tuple[int, int], float] = {}
    following: dict[int, float] = {}
    for number in range(len(trace) - 1, -1, -1):
        for block in trace.requests[number]:
            truth[number, block] = following.get(block, 1e9)
        following.update(dict.fromkeys(trace.requests[number], float(number)))
    wrong = chance.choice((1.0, 0.7, 0.3))

    def said(number: int, block: int) -> float:
        due = truth[number, block]
        return -due if (hash((seed, number, block)) % 1000) / 1000 < wrong else due

    return trace, capacity, said


def most_excess(trace: Trace, capacity: int, said: Callable[[int, int], float]) -> float:
    """The largest X - bound over all prefixes, against a naive LRU: never above 0, as promised."""
    cache = build("gati", capacity, lambda capacity, seed: Scripted(said), flat=trace.kind == "flat")
    naive = NaiveTree(capacity)
    longest = int(trace.lengths.max())
    excess = requested = 0
    worst = -float("inf")
    for number, row in enumerate(trace.requests):
        lru, _ = naive.access(row, number, lambda leaves, block: naive.lru(leaves))
        excess += lru - cache.access(row, float(number)).hits
        requested += len(row)
        worst = max(worst, excess - bound(requested, capacity, longest))
    return worst


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_holds_on_hostile_instances(seed: int) -> None:
    assert most_excess(*hostile_instance(seed)) <= 0.0


@pytest.mark.slow
def test_the_bound_holds_on_two_thousand_hostile_instances() -> None:
    broken = [seed for seed in range(2000) if most_excess(*hostile_instance(seed, requests=60)) > 0.0]
    assert not broken


def loop_that_lru_likes(rounds: int = 400) -> tuple[Trace, int, Callable[[int, int], float]]:
    """Blocks that come twice in a row, with predictions that throw them out in between."""
    chance = random.Random(5)
    items: list[int] = []
    for number in range(rounds):
        items += [chance.randrange(12), chance.randrange(12), 100 + number]
    trace = flat_trace(items)
    fresh = {block for block in range(trace.distinct) if trace.blocks.tolist().count(block) == 1}
    return trace, 13, lambda number, block: 0.0 if block in fresh else 1e6


class Deaf(Gati):
    """A mutation: the shadow sees nothing."""

    def _judge(self) -> None:
        self._excess = 0


class Stubborn(Gati):
    """A mutation: caught predictions do not narrow the choice, and the guard never steps in."""

    def _judge(self) -> None:
        self._share = 1.0


@pytest.mark.parametrize("mutation", [Deaf, Stubborn])
def test_without_the_guard_the_bound_breaks(mutation: type[Gati], monkeypatch: pytest.MonkeyPatch) -> None:
    instance = loop_that_lru_likes(1500)
    assert most_excess(*instance) <= 0.0
    monkeypatch.setitem(build.__globals__["policy_named"].__globals__["POLICIES"], "gati", mutation)
    monkeypatch.setattr(mutation, "evict", lambda self, count, missing: follow_only(self, count))
    assert most_excess(*instance) > 0.0


def follow_only(policy: Gati, count: int) -> list[int]:
    removed: list[int] = []
    policy._take(count, policy._predicted(), removed)
    return removed


@pytest.mark.parametrize("seed", range(20))
def test_the_shadow_is_lru(seed: int) -> None:
    trace, capacity, _ = hostile_instance(seed)
    shadow, naive = ShadowLru(capacity, flat=trace.kind == "flat"), NaiveTree(capacity)
    for number, row in enumerate(trace.requests):
        hits, _ = naive.access(row, number, lambda leaves, block: naive.lru(leaves))
        assert len(shadow.access(row[:capacity])) == hits


def test_inverted_predictions_make_the_guard_step_in_and_it_says_so() -> None:
    trace, capacity, said = loop_that_lru_likes(1500)
    cache = build("gati", capacity, lambda capacity, seed: Scripted(said), flat=True)
    for number, row in enumerate(trace.requests):
        cache.access(row, float(number))
    figures = cache.policy.figures()
    assert figures["guard"]["alarms"] >= 1
    assert figures["guard"]["share_learned"] < 1.0
    assert naive_next_use(trace, 0, 0) > 0.0
