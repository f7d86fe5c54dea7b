"""Policies against brute force, against eviction block by block, and against hostile predictions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import EvictError
from gati.evict.cache import BlockCache, Handle
from gati.evict.index.tree import RunTree
from gati.evict.policy.keyed import TailLru
from gati.evict.policy.predicting import Laru
from gati.evict.policy.registry import POLICIES, policy_named
from gati.evict.predict.base import Predictor
from gati.evict.predict.oracle import Oracle
from gati.evict.prefix import PrefixCache
from gati.evict.replays.replay import replay
from gati.evict.trace.records import Trace, make_trace
from tests.evict.naive import (
    NaiveTree,
    Scripted,
    best_leaf_hits,
    build,
    flat_trace,
    naive_laru,
    naive_next_use,
    tree_trace,
)
from tests.evict.strategies import flat_batches, flat_traces, long_trees, small_trees

capacities = st.integers(1, 6)
TREE_POLICIES = [
    name for name, policy in POLICIES.items() if not (policy.flat_only or policy.converses)
]  # test_lpc.py has those that ask about conversations
FLAT_POLICIES = [name for name, policy in POLICIES.items() if not policy.tree_only]


def served(cache: BlockCache, trace: Trace) -> list[int]:
    return [cache.access(ids, float(number)).hits for number, ids in enumerate(trace.requests)]


def made(name: str, capacity: int, predictor: Callable[[], Predictor], trace: Trace) -> BlockCache:
    return build(name, capacity, lambda capacity, seed: predictor(), flat=trace.kind == "flat")


def cached(cache: BlockCache) -> set[int]:
    return {block for run in cache.tree for block in run.ids}


def hostile(seed: int) -> Callable[[int, int], float]:
    """Predictions that depend on nothing but chance, huge, negative, equal or infinite."""
    chance = random.Random(seed)
    return lambda request, block: chance.choice((chance.random(), -1e9, 1e300, 0.0, math.inf, -math.inf))


def inverted(trace: Trace) -> Scripted:
    return Scripted(lambda number, block: -min(naive_next_use(trace, number, block), 1e9))


@given(small_trees, st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_perfect_predictions_give_what_brute_force_finds(trace: Trace, capacity: int) -> None:
    best = best_leaf_hits(trace, capacity)
    for name in ("opt-leaf", "laru", "gati"):
        cache = made(name, capacity, lambda: Oracle(trace), trace)
        assert sum(served(cache, trace)) == best, name
        if name == "laru":
            assert cache.policy.figures()["caught"] == 0


@pytest.mark.slow
@given(long_trees, st.integers(2, 12), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_laru_is_laru_block_by_block(trace: Trace, capacity: int, seed: int) -> None:
    chance = random.Random(seed)
    said = {
        (number, block): chance.random()
        for number, row in enumerate(trace.requests)
        for block in row[:capacity]
    }
    # a prediction is that of a block; LARU must not depend on how blocks lie in runs
    cache = made("laru", capacity, lambda: Scripted(lambda number, block: said[number, block]), trace)
    hits, caught = naive_laru(trace, capacity, lambda number, block: said[number, block])
    assert served(cache, trace) == hits
    assert cache.policy.figures()["caught"] == caught


class PhasesByItem(Laru):
    """A mutation: a phase ends within a request, before the (k + 1)-th block."""

    def begin(self, ids: list[int], hits: int, time_s: float) -> None:
        for block in ids:
            super().begin([block], hits, time_s)


class NeverNarrower(Laru):
    """A mutation: predictions caught wrong go on choosing among all leaves."""

    def evict(self, count: int, missing: list[int]) -> list[int]:
        self._share = 1.0
        return super().evict(count, missing)


def random_tree(seed: int, requests: int) -> tuple[Trace, int, Callable[[int, int], float]]:
    chance = random.Random(seed)
    rows = [[chance.randrange(3) for _ in range(chance.randint(1, 5))] for _ in range(requests)]
    said: dict[tuple[int, int], float] = {}
    return (
        tree_trace(rows),
        chance.randint(5, 12),
        lambda at, block: said.setdefault((at, block), chance.random()),
    )


def test_phases_that_end_within_a_request_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "laru", PhasesByItem)
    caught = 0
    for seed in range(40):
        trace, capacity, _ = random_tree(seed, 40)
        cache = made("laru", capacity, lambda trace=trace: Oracle(trace), trace)  # type: ignore[misc]
        served(cache, trace)
        caught += cache.policy.figures()["caught"]
    assert caught > 0


def test_a_choice_that_never_narrows_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "laru", NeverNarrower)
    differ = 0
    for seed in range(40):
        trace, capacity, said = random_tree(seed, 40)
        cache = made("laru", capacity, lambda said=said: Scripted(said), trace)  # type: ignore[misc]
        differ += served(cache, trace) != naive_laru(trace, capacity, said)[0]
    assert differ > 0


@pytest.mark.parametrize("name", ["fpb", "hf", "laru", "gati"])
@pytest.mark.parametrize("capacity", [3, 24])
def test_among_equal_predictions_lru_decides(name: str, capacity: int) -> None:
    chance = random.Random(capacity)
    deepest = 2 * capacity // 3
    rows = [[chance.randrange(2) for _ in range(chance.randint(1, deepest))] for _ in range(80)]
    for trace in (tree_trace(rows), flat_trace([chance.randrange(2 * capacity) for _ in range(200)])):
        cache = made(name, capacity, lambda: Scripted(lambda number, block: 0.0), trace)
        lru = build("lru", capacity, None, flat=trace.kind == "flat")
        for number, row in enumerate(trace.requests):
            got, expected = cache.access(row, float(number)), lru.access(row, float(number))
            assert (got.hits, sorted(got.evicted)) == (expected.hits, sorted(expected.evicted))


@pytest.mark.slow
@given(long_trees, capacities)
@settings(max_examples=60, deadline=None)
def test_lru_is_lru_block_by_block(trace: Trace, capacity: int) -> None:
    naive = NaiveTree(capacity)
    cache = build("lru", capacity, None)
    for number, row in enumerate(trace.requests):
        hits, evicted = naive.access(row, number, lambda leaves, block: naive.lru(leaves))
        got = cache.access(row, float(number))
        assert (got.hits, sorted(got.evicted)) == (hits, sorted(evicted))
        assert cached(cache) == set(naive.parent)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        pytest.param("fifo", lambda tree, block: tree.loaded[block], id="fifo"),
        pytest.param("lfu", lambda tree, block: (tree.counts[block], tree.used[block]), id="lfu"),
        pytest.param("slru", lambda tree, block: (tree.counts[block] > 1, tree.used[block]), id="slru"),
    ],
)
def test_ranked_policies_are_those_block_by_block(
    name: str, key: Callable[[NaiveTree, int], tuple[float, ...]]
) -> None:
    chance = random.Random(4)
    for _ in range(60):
        rows = [[chance.randrange(3) for _ in range(chance.randint(1, 6))] for _ in range(40)]
        trace, capacity = tree_trace(rows), chance.randint(1, 12)
        naive, cache = NaiveTree(capacity), build(name, capacity, None)
        for number, row in enumerate(trace.requests):
            hits, _ = naive.access(
                row, number, lambda leaves, block, naive=naive: min(leaves, key=lambda each: key(naive, each))
            )
            assert cache.access(row, float(number)).hits == hits
            assert cached(cache) == set(naive.parent)


@pytest.mark.slow
@pytest.mark.parametrize("name", TREE_POLICIES)
@given(trace=long_trees, capacity=capacities, seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_what_every_policy_keeps_to(name: str, trace: Trace, capacity: int, seed: int) -> None:
    cache = made(name, capacity, lambda: Scripted(hostile(seed), stretch=1 + seed % 3), trace)
    for number, row in enumerate(trace.requests):
        before = cached(cache)
        got = cache.access(row, float(number))
        after = cached(cache)
        path = row[:capacity]
        assert got.hits == next((place for place, block in enumerate(path) if block not in before), len(path))
        assert set(path) <= after, "a request is cached when it has been served"
        assert after == (before - set(got.evicted)) | set(path)
        assert len(after) <= capacity and cache.tree.used == len(after)
        assert not set(got.evicted) - before, "what leaves was cached"
        for run in cache.tree:
            assert run.parent is None or run.parent.ids, "parents outlive their children"


@pytest.mark.slow
@given(long_trees, st.integers(2, 12), st.integers(0, 50))
@settings(max_examples=80, deadline=None)
def test_laru_evicts_at_most_twice_k_a_phase_and_safely_only_what_is_stale(
    trace: Trace, capacity: int, seed: int
) -> None:
    tree = RunTree()
    predictor = Scripted(hostile(seed))
    policy = Laru(tree, capacity, predictor)
    cache = BlockCache(policy)
    phase, predicted, safe, requested = 1, 0, 0, set[int]()
    for number, row in enumerate(trace.requests):
        caught = policy.figures()["caught"]
        got = cache.access(row, float(number))
        figures = policy.figures()
        if figures["phases"] != phase:
            phase, predicted, safe, requested = figures["phases"], 0, 0, set()
        requested |= set(row[:capacity])
        now_safe = figures["caught"] - caught
        if now_safe == len(got.evicted):
            assert not requested & set(got.evicted), "LRU's leaf was not requested in this phase"
        safe += now_safe
        predicted += len(got.evicted) - now_safe
        assert predicted <= capacity and safe <= capacity
        assert len(requested) <= capacity


def scrambled(number: int, block: int) -> float:
    """A prediction of its own for every block."""
    return block * 37 % 11 + block / 100.0


@given(flat_traces, capacities)
@settings(max_examples=60, deadline=None)
def test_a_flat_trace_is_a_tree_of_paths_of_one(trace: Trace, capacity: int) -> None:
    tree = tree_trace([[int(block)] for block in trace.blocks])
    for name in TREE_POLICIES:
        flat = made(name, capacity, lambda: Scripted(scrambled), trace)
        deep = made(name, capacity, lambda: Scripted(scrambled), tree)
        assert served(flat, trace) == served(deep, tree), name


def naive_belady(items: list[int], capacity: int) -> int:
    """By definition: of the cached blocks and the new one, those used first are kept."""
    held: set[int] = set()
    hits = 0
    for number, item in enumerate(items):
        hits += item in held
        held.add(item)
        if len(held) > capacity:
            rest = items[number + 1 :]
            held.remove(max(held, key=lambda each: rest.index(each) if each in rest else math.inf))
    return hits


@given(flat_traces | flat_batches | small_trees, capacities)
@settings(max_examples=80, deadline=None)
def test_opt_is_belady_and_no_policy_hits_more(trace: Trace, capacity: int) -> None:
    """Of blocks that one request uses again, the first is used before the others: LRU had more hits."""
    capacity = min(capacity, trace.distinct)
    best = naive_belady(trace.blocks.tolist(), capacity)
    policies = FLAT_POLICIES if trace.kind == "flat" else TREE_POLICIES
    result = replay(trace, [capacity], ["opt", *policies], predictor="noise:0.5")
    assert result.outcomes[0].hits == best
    assert all(outcome.hits <= best for outcome in result.outcomes)


@pytest.mark.parametrize("broken", [math.nan, None], ids=["no number", "an error"])
def test_where_predictions_fail_lru_decides_and_it_is_counted(
    broken: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Scripted):
        def scores(self, count: int) -> np.ndarray:
            if broken is None:
                raise RuntimeError("no prediction today")
            return np.full(count, broken)

    chance = random.Random(0)
    trace = tree_trace([[chance.randrange(3) for _ in range(4)] for _ in range(80)])
    lru = build("lru", 9, None)
    cache = made("fpb", 9, lambda: Broken(lambda number, block: 0.0), trace)
    assert served(cache, trace) == served(lru, trace)
    assert cache.policy.figures()["failures"] > 10
    told = [record.exc_info is not None for record in caplog.records]
    assert told == ([True] if broken is None else []), "once, with its traceback"


def test_unknown_policies_and_markers_on_trees_are_refused() -> None:
    with pytest.raises(EvictError, match=r"unknown policy 'lur'; choose one of lru, fifo.*, opt$"):
        policy_named("lur", flat=False)
    with pytest.raises(EvictError, match="policy lmarker supports only independent blocks; use --flat"):
        policy_named("lmarker", flat=False)


def marker_misses(
    name: str, items: list[int], capacity: int, said: Callable[[int, int], float], seed: int
) -> int:
    trace = flat_trace(items)
    cache = build(name, capacity, lambda capacity, chance: Scripted(said), flat=True, seed=seed)
    return len(items) - sum(served(cache, trace))


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        pytest.param("predictive-marker", lambda k: 4 * harmonic(k), id="predictive-marker"),
        pytest.param("lmarker", lambda k: 4 * harmonic(k), id="lmarker"),
        pytest.param("guard", lambda k: 2 * harmonic(k - 1) + 2, id="guard"),
    ],
)
def test_markers_keep_their_bound_whatever_is_predicted(name: str, factor: Callable[[int], float]) -> None:
    """On a loop over k + 1 blocks, which LRU always misses, predicted the wrong way round."""
    capacity, loops = 32, 60  # so large that always to miss breaks the bound
    items = [item for _ in range(loops) for item in range(capacity + 1)]
    trace = flat_trace(items)
    optimal = len(items) - replay(trace, [capacity], ["opt-leaf"]).outcomes[0].hits
    wrong = {
        (number, block): -min(naive_next_use(trace, number, block), 1e9)
        for number, block in enumerate(trace.blocks.tolist())
    }
    misses = [
        marker_misses(name, items, capacity, lambda number, block: wrong[number, block], seed)
        for seed in range(5)
    ]
    # the blocks of the first phase are misses of everybody
    bound = factor(capacity) * optimal + capacity
    assert np.mean(misses) <= bound < len(items)


def harmonic(count: int) -> float:
    return sum(1.0 / number for number in range(1, count + 1))


def test_lmarker_evicts_at_random_what_is_still_unmarked_for_blocks_of_the_phase_before() -> None:
    # k = 2; phase 1 holds a, b. c is new to phase 2: furthest predicted of a, b leaves, which is a.
    # Then a: held when phase 2 began, so any unmarked block makes room, and b is the only one.
    trace = flat_trace([0, 1, 2, 0, 2])
    said = {0: 9.0, 1: 5.0, 2: 1.0}
    cache = build("lmarker", 2, lambda capacity, seed: Scripted(lambda number, block: said[block]), flat=True)
    evicted = [cache.access(ids, 0.0).evicted for ids in trace.requests]
    assert evicted == [[], [], [0], [1], []]


def test_a_chain_that_is_too_long_makes_the_predictive_marker_choose_at_random() -> None:
    # k = 4, H_4 = 2.08: after new block 4 evicts 3 (furthest), 3 evicts 2, then 2 may not follow predictions
    trace = flat_trace([0, 1, 2, 3, 4, 3, 2])
    said = {block: float(block) for block in range(5)}
    third = set()
    for seed in range(30):
        cache = build(
            "predictive-marker",
            4,
            lambda capacity, _: Scripted(lambda n, block: said[block]),
            flat=True,
            seed=seed,
        )
        evicted = [cache.access(ids, 0.0).evicted for ids in trace.requests]
        assert evicted[:6] == [[], [], [], [], [3], [2]]
        third.add(evicted[6][0])
    assert third == {0, 1}


def test_what_returns_in_its_phase_is_guarded_until_that_ends() -> None:
    # k = 3: 3 evicts 2 (furthest). 2 returns: guarded, a random old one leaves. 4 evicts the furthest
    # unguarded, which would be 2 were it not guarded.
    said = {0: 1.0, 1: 2.0, 2: 99.0, 3: 3.0, 4: 4.0}
    for seed in range(10):
        trace = flat_trace([0, 1, 2, 3, 2, 4])
        cache = build(
            "guard", 3, lambda capacity, _: Scripted(lambda n, block: said[block]), flat=True, seed=seed
        )
        evicted = [cache.access(ids, 0.0).evicted for ids in trace.requests]
        assert evicted[3] == [2] and evicted[4][0] in (0, 1)
        assert evicted[5] == [3]


def test_tail_lru_spares_what_keeps_a_conversation_below_its_threshold() -> None:
    # The older conversation keeps 3 + 4 - 6 = 1 block, and loses two before anything else goes.
    tree = RunTree()
    policy = POLICIES["tlru"](tree, 6, prompt_blocks=4, threshold_blocks=6)  # type: ignore[call-arg]
    cache = BlockCache(policy)
    cache.access([1, 2, 3], 0.0)
    cache.access([11, 12, 13], 1.0)
    assert cache.access([21, 22], 2.0).evicted == [2, 3]
    assert cache.access([31, 32], 3.0).evicted == [12, 13]
    assert cache.access([41], 4.0).evicted == [22]
    assert cached(cache) == {1, 11, 21, 31, 32, 41}


class LeafByLeaf(TailLru):
    """Looks at every leaf before each eviction."""

    def evict(self, count: int, missing: list[int]) -> list[int]:
        removed: list[int] = []
        while len(removed) < count:
            slots = [int(slot) for slot in np.flatnonzero(self._leaf[: len(self._runs)])]
            sparing = [slot for slot in slots if self._spared(slot) > 0]
            if not sparing:
                self._take(count - len(removed), self._by_recency(), removed)
                break
            slot = min(sparing, key=lambda each: float(self._recency[each]))
            self._cut(slot, min(self._spared(slot), count - len(removed)), removed)
        return removed


@pytest.mark.slow
@given(long_trees, st.integers(1, 12), st.integers(-3, 3), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_tail_lru_evicts_what_it_would_leaf_by_leaf(
    trace: Trace, capacity: int, spare: int, seed: int
) -> None:
    """Also with requests that overlap, and after the engine has dropped blocks on its own."""
    chance = random.Random(seed)
    made = []
    for policy in (TailLru, LeafByLeaf):
        tree = RunTree()
        blocks = {"prompt_blocks": 3 + spare, "threshold_blocks": 3}
        made.append(BlockCache(policy(tree, capacity, **blocks)))
    under_way: list[tuple[Handle, Handle]] = []
    for number, row in enumerate(trace.requests):
        handles = made[0].match(row), made[1].match(row)
        found: list[list[int] | str] = []
        for cache, handle in zip(made, handles, strict=True):
            try:
                found.append(cache.insert(handle, float(number)))
            except EvictError as error:
                found.append(str(error))
        assert found[0] == found[1]
        under_way.append(handles)
        while len(under_way) > chance.randrange(3):
            for cache, handle in zip(made, under_way.pop(0), strict=True):
                cache.release(handle)
        if chance.random() < 0.1:
            dropped = chance.randint(1, 3)
            for cache in made:
                leaves = [run for run in cache.tree if not run.children and not run.locks]
                for run in sorted(leaves, key=lambda run: run.ids[-1])[:1]:
                    cache.policy.drop(run, min(dropped, len(run.ids)))
        assert cached(made[0]) == cached(made[1])


def test_tail_lru_looks_at_few_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = build("tlru", 2000, None)
    for block in range(2000):
        cache.access([block], float(block))
    looks: list[int] = []
    spared = TailLru._spared
    monkeypatch.setattr(TailLru, "_spared", lambda self, slot: looks.append(slot) or spared(self, slot))
    assert cache.access([*range(5000, 5064)], 1e9).evicted == [*range(64)]
    assert len(looks) <= 2 * 64


def test_following_the_cheaper_keeps_within_twice_lru_and_a_cache() -> None:
    chance = random.Random(1)
    trace = flat_trace([min(int(chance.expovariate(0.2)), 30) for _ in range(3000)])
    capacity = 8
    lru = len(trace) - sum(served(build("lru", capacity, None, flat=True), trace))
    worst = len(trace) - sum(served(made("fpb", capacity, lambda: inverted(trace), trace), trace))
    both = len(trace) - sum(served(made("blindoracle+lru", capacity, lambda: inverted(trace), trace), trace))
    assert worst > 1.5 * lru
    assert both <= 2 * lru + capacity


@pytest.mark.parametrize(
    "name", [name for name, policy in POLICIES.items() if not (policy.flat_only or policy.foresees)]
)
def test_a_prompt_shorter_than_a_block_changes_nothing(name: str) -> None:
    cache = PrefixCache(8, policy=name)
    for ids in ([], [1, 2, 3], [], [1, 2, 4], []):
        cache.insert(cache.match(ids))
    assert cache.match([1, 2, 3]).hits == 3


@pytest.mark.parametrize("predictor", ["reuse", "oracle", "noise:0.5", "lognormal:1"])
def test_requests_without_blocks_are_replayed(predictor: str) -> None:
    """As traces have them for prompts shorter than a block: the oracle failed on them."""
    trace = make_trace([[], [1, 2, 3], [], [1, 2, 4], [1, 2, 3], []])
    result = replay(trace, [3], [*TREE_POLICIES, "opt"], predictor=predictor)
    assert result.of("opt-leaf", 3).hits == result.of("lru", 3).hits == 4


def test_times_may_be_as_large_as_nanoseconds_since_1970() -> None:
    """Adding a second to them changes nothing, of which the predictor took the logarithm of zero."""
    times = [1.76384e18 + 1e9 * number for number in range(6)]
    trace = make_trace([[1, 2], [1, 3]] * 3, times)
    assert replay(trace, [3], ["gati"]).of("gati", 3).hits == 9
