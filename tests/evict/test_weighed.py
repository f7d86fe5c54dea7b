"""`gati` where blocks differ in cost: it saves time, and its bound is one on time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gati.errors import EvictError
from gati.evict import PrefixCache
from gati.evict.cache import BlockCache
from gati.evict.policy import registry, sampled
from gati.evict.policy.guard import Gati, bound
from gati.evict.policy.lru_only import LruOnly
from gati.evict.policy.sampled import SampledGati
from gati.evict.policy.weighed import PathCosts
from gati.evict.predict.oracle import Oracle
from gati.evict.replays.replay import replay
from gati.evict.trace.records import Trace
from tests.evict.naive import NaiveTree, Scripted, build, flat_trace, tree_trace

GROWTHS = (0.02, 0.3, 3.0)


@given(st.floats(0.0, 10.0), st.integers(0, 200))
def test_the_cost_of_a_path_is_that_of_its_blocks(growth: float, blocks: int) -> None:
    costs = PathCosts(growth)
    assert costs.upto(blocks) == pytest.approx(sum(map(costs.at, range(blocks))))


@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf])
def test_a_cost_that_falls_or_is_not_a_number_is_told(wrong: float) -> None:
    with pytest.raises(EvictError, match="give a number from 0, such as 0.02"):
        PrefixCache(10, cost_growth=wrong)
    with pytest.raises(EvictError, match="cost_growth"):
        PrefixCache(10, "lru", cost_growth=wrong)


def test_blocks_without_parents_have_no_depth() -> None:
    with pytest.raises(EvictError, match="needs paths"):
        build(
            "gati", 4, lambda capacity, seed: Scripted(lambda number, block: 1.0), flat=True, cost_growth=0.1
        )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), unique_by=lambda row: row[0]))
def test_only_evictions_that_say_more_than_later_ones_are_kept(rows: list[tuple[int, int]]) -> None:
    absent = LruOnly()
    for number, (evicted, cost) in enumerate(rows):
        absent.add(number, float(evicted), float(cost))
    told = absent.evictions([*range(len(rows)), 99])
    for evicted, cost in rows:
        assert any(later >= evicted and more >= cost for later, more in told)
    assert told == sorted(told, reverse=True) and len({cost for _, cost in told}) == len(told)
    assert absent.cost == sum(cost for _, cost in rows)
    assert absent.discard(range(len(rows))) == sum(cost for _, cost in rows)
    assert (len(absent), absent.cost) == (0, 0.0)


def conversations(seed: int, requests: int = 150) -> Trace:
    """Random paths over a small alphabet, some much longer than others."""
    chance = random.Random(seed)
    width, deepest = chance.randint(2, 3), chance.randint(3, 10)
    lengths = [chance.choice((1, 2, deepest)) for _ in range(requests)]
    return tree_trace([[chance.randrange(width) for _ in range(length)] for length in lengths])


def mostly_wrong(seed: int, trace: Trace) -> Callable[[int, int], float]:
    """Times until the next use that mostly say the opposite of the truth."""
    truth: dict[tuple[int, int], float] = {}
    following: dict[int, float] = {}
    for number in range(len(trace) - 1, -1, -1):
        for block in trace.requests[number]:
            truth[number, block] = following.get(block, 1e6) - number
        following.update(dict.fromkeys(trace.requests[number], float(number)))
    return lambda number, block: (
        1e6 / truth[number, block] if hash((seed, number, block)) % 10 < 8 else truth[number, block]
    )


def most_time_lost(trace: Trace, capacity: int, said: Callable[[int, int], float], growth: float) -> float:
    """The largest cost beyond a naive LRU's, less the bound, over all prefixes of a trace."""
    cache = build("gati", capacity, lambda capacity, seed: Scripted(said), cost_growth=growth)
    naive, costs = NaiveTree(capacity), PathCosts(growth)
    longest = min(int(trace.lengths.max()), capacity)
    lost = asked = 0.0
    worst = -math.inf
    for number, row in enumerate(trace.requests):
        held, _ = naive.access(row, number, lambda leaves, block: naive.lru(leaves))
        lost += costs.upto(held) - costs.upto(cache.access(row, float(number)).hits)
        asked += costs.upto(min(len(row), capacity))
        worst = max(worst, lost - bound(asked, capacity, longest, growth))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("growth", GROWTHS)
def test_the_time_lost_against_lru_is_bounded(growth: float) -> None:
    for seed in range(25):
        trace = conversations(seed)
        capacity = random.Random(seed).choice((3, 8, 16, 24))
        assert most_time_lost(trace, capacity, mostly_wrong(seed, trace), growth) <= 0.0


@pytest.mark.slow
@pytest.mark.parametrize("growth", GROWTHS)
def test_without_the_guard_the_time_lost_is_not_bounded(
    growth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations that come twice in a row, and are thrown out in between for others that never return."""
    chance = random.Random(5)
    roots: list[int] = []
    for number in range(2_000):
        roots += [chance.randrange(12), chance.randrange(12), 100 + number]
    trace = tree_trace([[root, 1, 2, 3] for root in roots])
    once = {block for block in range(trace.distinct) if (trace.blocks == block).sum() == 1}
    instance = trace, 52, lambda number, block: 0.0 if block in once else 1e6
    assert most_time_lost(*instance, growth) <= 0.0
    monkeypatch.setattr(Gati, "_judge", lambda self: None)
    monkeypatch.setattr(Gati, "_exposed", lambda self: False)
    monkeypatch.setattr(Gati, "_forgiving", lambda self: True)
    assert most_time_lost(*instance, growth) > 0.0


def serving(trace: Trace, capacity: int, growth: float) -> tuple[BlockCache, Gati]:
    """A cache whose predictions are exact."""
    cache = build("gati", capacity, lambda capacity, seed: Oracle(trace), cost_growth=growth)
    assert isinstance(cache.policy, Gati)
    return cache, cache.policy


@pytest.mark.parametrize("seed", range(12))
def test_the_books_are_right_after_every_request(seed: int) -> None:
    trace, growth = conversations(seed), GROWTHS[seed % 3]
    said = mostly_wrong(seed, trace)
    cache = build("gati", 12, lambda capacity, seed: Scripted(said), cost_growth=growth)
    policy = cache.policy
    assert isinstance(policy, Gati)
    place = {block: at for row in trace.requests for at, block in enumerate(row)}
    lost = 0.0
    shadow_hits = []
    for number, row in enumerate(trace.requests):
        held = [block in policy._shadow.held for block in row]
        shadow_hits.append(held.index(False) if False in held else len(held))
        hits = cache.access(row, float(number)).hits
        lost += policy._costs.upto(shadow_hits[-1]) - policy._costs.upto(hits)
        ours = {block for run in cache.tree for block in run.ids}
        assert set(policy._above) == ours
        assert all(policy._last_costs[run.slot] == policy._costs.at(run.end - 1) for run in cache.tree)
        absent = policy._shadow.held - ours
        assert set(policy._only) == absent
        assert policy._only.cost == pytest.approx(sum(policy._costs.at(place[block]) for block in absent))
        assert policy._behind == pytest.approx(lost)


@pytest.mark.parametrize("seed", range(20))
def test_exact_predictions_are_never_wrong_whatever_blocks_cost(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LARU, which counts blocks, may still object."""
    trace, growth = conversations(seed), GROWTHS[seed % 3]
    verdicts: list[bool] = []
    was_wrong = Gati._was_wrong
    monkeypatch.setattr(Gati, "_was_wrong", lambda self, ids: verdicts.append(was_wrong(self, ids)))
    cache, policy = serving(trace, 10, growth)
    for number, row in enumerate(trace.requests):
        cache.access(row, float(number))
    assert len(verdicts) == len(trace) and not any(verdicts)
    assert not policy._contradicted


def test_a_block_that_costs_more_stays_although_it_is_needed_later() -> None:
    """A long conversation returns in 10 requests, a short one in 8; their last blocks cost 10 and 1."""
    long, short = list(range(10)), [100]
    due = {block: 10.0 for block in long} | {100: 8.0, 200: 1.0}
    gone = {}
    for growth in (0.0, 1.0):
        cache = build(
            "gati", 11, lambda capacity, seed: Scripted(lambda number, block: due[block]), cost_growth=growth
        )
        cache.access(long, 0.0)
        cache.access(short, 1.0)
        gone[growth] = cache.access([200], 2.0).evicted
    assert gone == {0.0: [9], 1.0: [100]}


def chats(requests: int) -> Trace:
    """Short conversations that return soon, long ones that return late, and many that never do."""
    chance = random.Random(0)
    rows: list[list[int]] = []
    for number in range(requests):
        kind = chance.random()
        if kind < 0.4:
            rows.append([1_000_000 + chance.randrange(60), 1, 2, 3])
        elif kind < 0.5:
            rows.append([2_000_000 + chance.randrange(8), *range(40)])
        else:
            rows.append([number, *range(chance.randrange(1, 6))])
    return tree_trace(rows)


@pytest.mark.slow
def test_more_time_is_saved_than_by_counting_blocks() -> None:
    trace, costs = chats(3_000), PathCosts(0.2)
    saved = {}
    for growth in (0.0, costs.growth):
        cache, policy = serving(trace, 260, growth)
        hits = [cache.access(row, float(number)).hits for number, row in enumerate(trace.requests)]
        saved[growth] = sum(map(costs.upto, hits))
        assert policy.figures()["guard"]["alarms"] == 0
    assert saved[costs.growth] > 1.05 * saved[0.0]


def test_a_replay_says_what_time_was_saved() -> None:
    trace, growth = chats(600), 0.2
    outcomes = replay(trace, [260], ["lru", "gati", "opt"], predictor="oracle", cost_growth=growth)
    lru, gati, opt = outcomes.outcomes
    cache, costs = build("lru", 260, None), PathCosts(growth)
    saved = sum(costs.upto(cache.access(row, float(at)).hits) for at, row in enumerate(trace.requests))
    asked = sum(costs.upto(len(row)) for row in trace.requests)
    assert lru.time_saved == pytest.approx(saved / asked)
    assert gati.time_saved is not None and gati.time_saved > 1.2 * saved / asked
    assert opt.time_saved is None
    counted = replay(trace, [260], ["gati"], predictor="oracle").outcomes[0]
    assert counted.time_saved == pytest.approx(counted.hit_rate)
    for name in ("lru", "gati"):
        with pytest.raises(EvictError, match="cost_growth needs paths"):
            replay(flat_trace([1, 2, 1]), [1], [name], cost_growth=growth)
    with pytest.raises(EvictError, match="cost_growth is -1"):
        replay(trace, [260], ["lru"], cost_growth=-1.0)


def test_predictions_that_fail_leave_the_decision_to_lru_not_to_costs() -> None:
    class Broken(Scripted):
        def scores(self, count: int) -> np.ndarray:
            raise RuntimeError("no")

    trace = conversations(1)
    hits = {}
    for name in ("lru", "gati"):
        cache = build(name, 10, lambda capacity, seed: Broken(lambda number, block: 0.0), cost_growth=2.0)
        hits[name] = [cache.access(row, float(number)).hits for number, row in enumerate(trace.requests)]
    assert hits["gati"] == hits["lru"]


@pytest.mark.slow
def test_a_sampled_shadow_counts_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "WHOLE_SHADOW", 100)
    monkeypatch.setattr(registry, "WHOLE_SHADOW", 100)
    trace, costs = chats(3_000), PathCosts(0.2)
    cache = build("gati", 260, lambda capacity, seed: Oracle(trace), cost_growth=costs.growth)
    policy = cache.policy
    assert isinstance(policy, SampledGati)
    lru = build("lru", 260, None)
    ahead = 0.0
    for number, row in enumerate(trace.requests):
        hits, other = (each.access(row, float(number)).hits for each in (cache, lru))
        ahead += costs.upto(hits) - costs.upto(other)
    assert policy.figures()["guard"]["alarms"] == 0
    assert -policy.excess == pytest.approx(ahead, rel=0.3)
