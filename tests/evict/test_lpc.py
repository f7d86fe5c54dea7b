"""LPC: its choices block by block, what it gains where probabilities are good, and loses where not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import EvictError
from gati.evict import PrefixCache, Trace, bound, make_trace, replay
from gati.evict.cache import BlockCache
from gati.evict.engine.pages import KeptPrefixes
from gati.evict.policy.lpc import LaruLpc
from gati.evict.policy.registry import POLICIES
from gati.evict.predict.conversing import (
    ContinuationOracle,
    HintedContinuation,
    KnownContinuation,
    hinted,
)
from gati.evict.trace.synthesise import StreamSettings, synthesise, trace_of
from tests.evict.naive import NaiveTree, build, flat_trace
from tests.evict.strategies import long_trees
from tests.evict.talking import talks

CONVERSING = [name for name, policy in POLICIES.items() if policy.converses]
capacities = st.integers(1, 8)
GAP_S = 3.0


def known(trace: Trace, seed: int) -> KnownContinuation:
    chance = np.random.default_rng(seed)
    return KnownContinuation(chance.choice([0.01, 0.5, 0.9, 0.99], len(trace)), GAP_S)


def made(
    name: str, capacity: int, source: Callable[[], KnownContinuation | ContinuationOracle]
) -> BlockCache:
    return build(name, capacity, lambda capacity, seed: source())


@pytest.mark.slow
@given(long_trees, capacities, st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_lpc_is_lpc_block_by_block(trace: Trace, capacity: int, seed: int) -> None:
    """A block's key is the largest of the conversations through it that were not continued, since loaded."""
    source = known(trace, seed)
    cache = made("lpc", capacity, lambda: source)
    naive = NaiveTree(capacity)
    tips: dict[int, tuple[int, float]] = {}  # last block of a conversation: its request and key
    through: dict[int, list[int]] = {}  # requests by block
    for number, row in enumerate(trace.requests):
        ids = row[:capacity]
        keys = {request: key for request, key in tips.values()}

        def choose(leaves: list[int], block: int, keys: dict[int, float] = keys) -> int:
            def rank(each: int) -> tuple[float, tuple[int, int]]:
                return max(keys.get(request, -math.inf) for request in through[each]), naive.used[each]

            return min(leaves, key=rank)

        before = set(naive.parent)
        hits, evicted = naive.access(row, number, choose)
        assert cache.access(row, float(number)).hits == hits
        assert {block for run in cache.tree for block in run.ids} == set(naive.parent)
        for block in evicted:
            del through[block]
        for block in ids:
            tips.pop(block, None)
            through.setdefault(block, []).append(number)
        tips[ids[-1]] = (number, source.key)
        assert set(through) == (before - set(evicted)) | set(ids)


@given(long_trees, capacities, st.sampled_from([0.2, 0.99, math.nan]))
@settings(max_examples=50, deadline=None)
def test_equal_or_unknown_probabilities_are_lru(trace: Trace, capacity: int, probability: float) -> None:
    cache = made("lpc", capacity, lambda: KnownContinuation(np.full(len(trace), probability), GAP_S))
    lru = build("lru", capacity, None)
    for number, row in enumerate(trace.requests):
        assert cache.access(row, float(number)) == lru.access(row, float(number))


@pytest.mark.parametrize("name", CONVERSING)
@given(trace=long_trees, capacity=capacities, seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_requests_are_cached_and_nothing_above_them_leaves(
    name: str, trace: Trace, capacity: int, seed: int
) -> None:
    cache = made(name, capacity, lambda: known(trace, seed))
    for number, row in enumerate(trace.requests):
        before = {block for run in cache.tree for block in run.ids}
        got = cache.access(row, float(number))
        after = {block for run in cache.tree for block in run.ids}
        assert after == (before - set(got.evicted)) | set(row[:capacity])
        assert len(after) == cache.tree.used <= capacity
        assert set(got.evicted) <= before
        assert all(run.parent is None or run.parent.ids for run in cache.tree)


@pytest.mark.slow
@given(long_trees, capacities, st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_laru_with_lpc_keeps_the_bound_of_the_guard(trace: Trace, capacity: int, seed: int) -> None:
    cache = made("laru+lpc", capacity, lambda: known(trace, seed))
    lru = build("lru", capacity, None)
    excess = requested = 0
    longest = int(trace.lengths.max())
    for number, row in enumerate(trace.requests):
        excess += lru.access(row, float(number)).hits - cache.access(row, float(number)).hits
        requested += len(row)
        assert excess <= bound(requested, capacity, longest)


def test_laru_with_lpc_is_tested_before_it_evicts() -> None:
    """Half of the blocks are said to end and return, the others are said to go on and never do.

    Hits alone show that, so predictions may not evict the first half for blocks that are said to go on.
    """
    half = 200
    cache = build("laru+lpc", 2 * half, hinted(100.0))
    policy, source = cache.policy, cache.predictor
    assert isinstance(policy, LaruLpc) and isinstance(source, HintedContinuation)
    returning, lasting, fresh = range(half), range(1000, 1000 + half), range(2000, 2000 + half)
    asked = [(block, 0.99) for block in lasting] + [(block, 0.01) for _ in range(3) for block in returning]
    asked += [(block, 0.99) for block in fresh] + [(block, 0.01) for block in returning]
    for number, (block, probability) in enumerate(asked, 1):
        source.hint(probability)
        cache.access([block], 0.01 * number)
        if number == half + 2 * half:
            assert policy._contradicted
        assert policy.excess <= max(0.005 * number, 1)


def test_a_farewell_lowers_the_key_of_its_conversation() -> None:
    """The first conversation is used last, but says goodbye; without that the second would leave."""
    for last, leaving in ((0.01, 3), (0.9, 12)):
        cache = PrefixCache(blocks=5, policy="lpc", gap_s=100.0, clock=iter(range(100)).__next__)
        for ids, probability in (([1, 2], 0.9), ([11, 12], 0.9), ([1, 2, 3], last)):
            match = cache.match(ids)
            cache.insert(match, hints={"continue": probability})
            cache.release(match)
        match = cache.match([21])
        assert cache.insert(match, hints={"continue": 0.9}) == [leaving]


def test_the_newest_of_many_conversations_keeps_what_they_share() -> None:
    """More conversations begin alike than are remembered: what they share stays, and memory is bounded."""
    cache = made("lpc", 4, lambda: KnownContinuation(np.full(3000, 0.5), 1.0))
    assert cache.access([0, 1], 0.0).hits == 0
    for number in range(1, 3000):
        assert cache.access([0, number + 1], float(number)).hits == 1


def test_memory_of_a_shared_run_is_bounded() -> None:
    cache = made("lpc", 4, lambda: KnownContinuation(np.full(20_000, 0.5), 1.0))
    for number in range(20_000):
        cache.access([0, number + 1], float(number))
    book = cache.policy._book  # type: ignore[attr-defined]
    assert max(map(len, book._through)) < 5_000


@pytest.fixture(scope="module")
def stream() -> Trace:
    shape = StreamSettings(active=60, gap_s=100.0, duration_s=3000.0, block_tokens=4)
    return trace_of(synthesise(talks(600, clear=1.0, longest=5), shape))


@pytest.mark.slow
def test_on_conversations_good_probabilities_gain_and_wrong_ones_cost_little(stream: Trace) -> None:
    sizes = [150, 300]
    truth = np.array([talk.goes_on for talk in stream.talks or ()])
    chance = np.random.default_rng(0)
    said = np.where(chance.random(len(truth)) < 0.1, ~truth, truth).astype(float)
    policies = ["lru", "lpc", "laru+lpc"]
    good = replay(stream, sizes, [*policies, "lpc-oracle"], continuation=said)
    wrong = replay(stream, sizes, policies, continuation=1.0 - said)
    mixed = replay(stream, sizes, policies, continuation=chance.permutation(said))
    for size in sizes:
        lru, oracle = (good.of(name, size).hit_rate for name in ("lru", "lpc-oracle"))
        assert good.of("lpc", size).hit_rate > lru + 0.5 * (oracle - lru)
        assert good.of("laru+lpc", size).hit_rate > lru + 0.3 * (oracle - lru)
        assert mixed.of("lpc", size).hit_rate < lru + 0.1 * (oracle - lru)
        assert wrong.of("lpc", size).hit_rate < lru - 0.03
        assert wrong.of("laru+lpc", size).hit_rate > lru - 0.01


def test_what_lpc_cannot_be_asked_is_refused(stream: Trace) -> None:
    silent = make_trace([[1, 2], [1, 3]])
    with pytest.raises(EvictError, match="need a continuation model"):
        replay(stream, [10], ["lpc"])
    with pytest.raises(EvictError, match="has requests without goes_on"):
        replay(silent, [2], ["lpc-oracle"])
    with pytest.raises(EvictError, match="has lines without user prompts"):
        replay(silent, [2], ["lpc"], continuation="folder")
    with pytest.raises(EvictError, match="probabilities for 2 requests"):
        replay(silent, [2], ["lpc"], continuation=np.ones(3))
    with pytest.raises(EvictError, match="leave out --flat"):
        replay(flat_trace([1, 2, 1]), [1], ["lpc"], continuation=np.ones(3))
    cache = PrefixCache(blocks=4, policy="lpc")
    match = cache.match([1])
    with pytest.raises(EvictError, match="is not a probability"):
        cache.insert(match, hints={"continue": "yes"})
    assert cache.insert(match, hints={"continue": np.float32(0.5)}) == [] and len(cache) == 1


@pytest.mark.parametrize("name", ["lpc", "laru+lpc"])
def test_requests_under_way_stay(name: str) -> None:
    """Handles that overlap: what is locked never leaves, whatever is said of its conversation."""
    chance = random.Random(0)
    cache = PrefixCache(blocks=12, policy=name, clock=iter(range(10_000)).__next__)
    open_ones: list[tuple[list[int], object]] = []
    for number in range(500):
        first = chance.randrange(6)
        ids = [first, *range(100 * first + 10, 100 * first + 10 + chance.randrange(4))]
        match = cache.match(ids)
        gone = set(cache.insert(match, hints={"continue": chance.random()}))
        assert not gone & {block for held, _ in open_ones for block in held} | gone & set(ids)
        open_ones.append((ids, match))
        if len(open_ones) > 2:
            cache.release(open_ones.pop(0)[1])  # type: ignore[arg-type]
        assert len(cache) <= 12, number


def test_an_answer_that_is_stored_late_keeps_the_probability_of_its_own_conversation() -> None:
    books = KeptPrefixes("lpc").books(6)
    for first, probability in ((10, 0.9), (20, 0.1)):
        books.hint(probability)
        books.begin([first, first + 1], 0.0)
        books.stored([first, first + 1])
        books.finish()
    for first in (10, 20):
        books.resume([first, first + 1, first + 2], 1.0)
        books.stored([first + 2])
        books.finish()
    books.hint(0.5)
    books.begin([30, 31], 2.0)
    assert books.victims(2, [30, 31]) == [22, 21]
