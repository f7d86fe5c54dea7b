"""LARU and the guard within sets, against evictions one at a time; what the predictor learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gati.evict import bound
from gati.evict.embed.cache import EmbeddingCache
from gati.evict.embed.learned import GuardedRows, LaruRows
from gati.evict.embed.leaving import NEVER, leaving
from gati.evict.embed.replacing import RequestedRows, RowPolicy
from gati.evict.embed.returns import ReturnSettings, RowReturns
from gati.evict.embed.sets import WAYS, RowSets, hashed
from gati.evict.embed.tiers import Ids, MemoryTier
from tests.evict.embed.naive import NaiveLru, leave_one_by_one

Floats = NDArray[np.float64]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data(), spare=st.sampled_from([0, 3]))
def test_what_leaves_is_what_leaves_one_by_one(data: st.DataObject, spare: int) -> None:
    """Also where `spare` places of each set are empty."""
    sets = data.draw(st.integers(1, 4))
    width = 12 + spare
    recency = np.full((sets, width), NEVER)
    later = np.zeros((sets, width), dtype=np.float32)
    count, safe, window = [], [], []
    expected: set[int] = set()
    lru: set[int] = set()
    for home in range(sets):
        size = data.draw(st.integers(0, 12))
        leaves = data.draw(st.integers(0, size // 2))
        first = data.draw(st.integers(0, leaves))
        choice = data.draw(st.integers(1, max(size - leaves, 1)))
        at = np.random.default_rng(size).permutation(width)[:size] + home * width
        queue = [(place, float(data.draw(st.integers(0, 5)))) for place in at.tolist()]
        expected |= set(leave_one_by_one(queue, used=size - leaves, safe=first, window=choice, count=leaves))
        lru |= set(at[:leaves].tolist())
        recency.reshape(-1)[at] = 10 * np.arange(size) + home
        later.reshape(-1)[at] = [value for _, value in queue]
        count.append(leaves), safe.append(first), window.append(choice)
    gone, against = leaving(
        recency, later, count=np.array(count), safe=np.array(safe), window=np.array(window)
    )
    assert len(gone) == len(expected)
    assert set(gone.tolist()) == expected
    assert set(gone[against].tolist()) == expected - lru


class Told(RowReturns):
    """Predicts what it is told for each id; keeps to the ids of one batch at a time."""

    def __init__(self, sets: RowSets, next_use: dict[int, float]) -> None:
        super().__init__(1)
        self.sets, self.next_use = sets, next_use
        self.batch = np.zeros(0, dtype=np.int64)

    def observe(self, batch: RequestedRows) -> NDArray[np.int16]:
        return np.asarray(batch.ids, dtype=np.int16)  # the cell of an id is the id

    def later(self, cells: NDArray[np.int16], age: Floats) -> NDArray[np.float32]:
        found = [self.next_use.get(id_, 1e9) for id_ in cells.reshape(-1).tolist()]
        return np.array(found, dtype=np.float32).reshape(cells.shape)


class Driver:
    """Serves batches from a policy, without rows."""

    def __init__(self, policy: RowPolicy) -> None:
        self.policy, self.clock, self.fetched = policy, 0, 0

    def serve(self, batch: list[int]) -> None:
        ids, counts = np.unique(np.array(batch, dtype=np.int64), return_counts=True)
        last = np.array([len(batch) - 1 - batch[::-1].index(id_) for id_ in ids.tolist()])
        end = self.clock + len(batch)
        sets = self.policy.sets
        places = hashed(ids, sets.sets)
        requested = RequestedRows(ids, places, counts, self.clock + last, self.clock, end)
        slots = sets.find(ids, places)
        requested = self.policy.observe(requested)
        served = self.policy.serve(requested, slots)
        foreseen = self.policy.foresee(requested, slots, served)
        self.policy.commit(requested, served)
        changes = self.policy.plan(requested, slots, served.limits)
        for one, other in zip(
            (*foreseen.leaving, foreseen.kept), (*changes.leaving, changes.kept), strict=True
        ):
            np.testing.assert_array_equal(one, other)
        self.policy.replace(requested, changes)
        self.clock = end
        self.fetched += int(np.count_nonzero(slots < 0))
        assert (sets.used <= sets.room).all()


def made(kind: type[LaruRows], capacity: int, sets: int) -> tuple[Driver, dict[int, float]]:
    held = RowSets(sets * WAYS)
    held.allow(capacity)
    next_use: dict[int, float] = {}
    return Driver(kind(held, Told(held, next_use))), next_use


batches = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=5, max_size=40)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(trace=batches, capacity=st.integers(6, 20))
def test_exact_predictions_are_never_caught(trace: list[list[int]], capacity: int) -> None:
    driver, next_use = made(LaruRows, capacity, sets=1)
    for number, batch in enumerate(trace):
        next_use.clear()
        for ahead in range(len(trace) - 1, number, -1):
            next_use.update(dict.fromkeys(trace[ahead], float(ahead)))
        driver.serve(batch)
    assert driver.policy.figures()["caught"] == 0


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(trace=batches, capacity=st.integers(8, 20), sets=st.integers(1, 3), seed=st.integers(0, 1000))
def test_the_guard_bounds_what_is_fetched_beyond_lru_whatever_is_predicted(
    trace: list[list[int]], capacity: int, sets: int, seed: int
) -> None:
    driver, next_use = made(GuardedRows, capacity, sets)
    naive = NaiveLru(sets, driver.policy.sets.room.tolist())
    random = np.random.default_rng(seed)
    lacking = requested = 0
    for batch in trace * 4:
        upcoming = trace[(driver.clock + 1) % len(trace)]
        next_use.update(dict.fromkeys(upcoming, float(random.integers(1e6))))  # used soon: said to be late
        lacking += naive.access(batch)
        requested += len(set(batch))
        driver.serve(batch)
        assert driver.policy.figures()["guard"]["excess"] == driver.fetched - lacking  # it watches all sets
        assert driver.fetched - lacking <= bound(requested, capacity, 6)


def test_the_guard_steps_in_where_predictions_are_wrong() -> None:
    driver, next_use = made(GuardedRows, 32, sets=1)
    next_use.update(dict.fromkeys(range(8), 1e12))  # what is always used is said never to be
    for turn in range(200):
        driver.serve([*range(8), *range(1000 + 10 * turn, 1010 + 10 * turn)])
    guard = driver.policy.figures()["guard"]
    assert guard["alarms"] >= 1
    assert guard["excess"] <= bound(200 * 18, 32, 18)


def test_caught_predictions_halve_the_window() -> None:
    driver, next_use = made(LaruRows, 8, sets=1)
    for id_ in range(8):
        driver.serve([id_])
    next_use[7] = 1e12  # LRU would take 0
    driver.serve([8])
    assert driver.policy.sets.find(np.array([7]), hashed(np.array([7]), 1))[0] == -1
    assert driver.policy.windows().tolist() == [8]
    driver.serve([7])  # the phase began with 8, and holds 8 and 7
    assert driver.policy.figures()["caught"] == 1
    assert driver.policy.windows().tolist() == [4]


@pytest.mark.parametrize(
    ("policy", "saved_before", "caught"),
    [(LaruRows, True, True), (GuardedRows, True, False), (GuardedRows, False, True)],
)
def test_predictions_are_not_caught_while_no_more_is_fetched_than_by_lru(
    policy: type[LaruRows], saved_before: bool, caught: bool
) -> None:
    driver, next_use = made(policy, 64, sets=1)
    for id_ in range(64):
        driver.serve([id_])
    next_use[63] = 1e12
    driver.serve([64])  # instead of 63, LRU evicts 0
    if saved_before:
        driver.serve([0])
    driver.serve([63])
    next_use[62] = 1e12
    driver.serve([65])
    driver.serve([62])
    assert driver.policy.figures()["caught"] == caught
    assert driver.policy.windows().tolist() == [32 if caught else 64]


def test_a_phase_begins_when_more_is_fetched_than_by_lru() -> None:
    """What predictions evicted before, and was requested before, counts no more."""
    driver, next_use = made(GuardedRows, 64, sets=1)
    for id_ in range(64):
        driver.serve([id_])
    for late, new in ((63, 64), (62, 65), (61, 66)):
        next_use[late] = 1e12
        driver.serve([new])
    driver.serve([63, 62])  # LRU has both, and predictions are wrong from now on
    assert driver.policy.figures()["caught"] == 0
    driver.serve([61])  # it was evicted before
    assert driver.policy.figures()["caught"] == 0
    figures = driver.policy.figures()
    assert (figures["guard"]["excess"], figures["phases"]) == (3, 1)
    for id_ in range(1000, 1061):  # with these, 64 different ids were requested in the phase
        driver.serve([id_])
    assert driver.policy.figures()["phases"] == 1
    driver.serve([1061])
    assert driver.policy.figures()["phases"] == 2


def test_predictions_choose_from_the_whole_queue_as_soon_as_no_more_is_fetched_than_by_lru() -> None:
    driver, next_use = made(GuardedRows, 64, sets=1)
    for id_ in range(64):
        driver.serve([id_])
    for late, new in ((63, 64), (62, 65)):
        next_use[late] = 1e12
        driver.serve([new])
        driver.serve([late])  # LRU has it
    figures = driver.policy.figures()
    assert (figures["guard"]["excess"], figures["caught"], driver.policy.windows().tolist()) == (2, 1, [32])
    for late, kept, new in ((3, 2, 66), (5, 4, 67)):
        next_use[late] = 1e12
        driver.serve([new])
        driver.serve([kept])  # LRU has evicted it
    assert driver.policy.figures()["guard"]["excess"] == 0
    assert driver.policy.windows().tolist() == [64]


def skewed_traffic(policy: str, seed: int, rows: int) -> int:
    random = np.random.default_rng(seed)
    chances = np.cumsum(np.arange(1, 5_001, dtype=np.float64) ** -1.0)
    ids = random.permutation(5_000)
    cache = EmbeddingCache(MemoryTier(torch.zeros(5_000, 4)), rows, mode="sum", policy=policy)
    for _ in range(80):
        drawn = np.searchsorted(chances, random.random(600) * chances[-1])
        cache(torch.from_numpy(ids[drawn]).view(12, 50))
    return int(cache.figures()["fetched"])


@pytest.mark.parametrize("seed", [0, 1])
def test_learning_fetches_fewer_rows_than_lru_where_some_are_popular(seed: int) -> None:
    lru = skewed_traffic("lru", seed, 150)
    assert skewed_traffic("gati", seed, 150) < 0.885 * lru


def batch_of(ids: Ids, begin: int, end: int) -> RequestedRows:
    counts = np.ones_like(ids)
    return RequestedRows(ids, hashed(ids, 1), counts, begin + np.arange(len(ids)), begin, end)


def test_rows_that_return_often_are_worth_more_than_those_seen_once() -> None:
    returns = RowReturns(200, seed=0)
    hot = np.arange(20)
    for number in range(120):
        ids = np.concatenate((hot, np.arange(1000 + 20 * number, 1020 + 20 * number)))
        cells = returns.observe(batch_of(ids, 40 * number, 40 * number + 40))
        if returns.fits == 0:
            ages = np.array([3.0, 7.0])
            assert (returns.later(cells[:2], ages) == ages).all()
    assert returns.fits >= 1
    later = returns.later(cells, np.zeros(len(cells)))
    np.testing.assert_array_equal(later, returns.waits(cells))
    np.testing.assert_array_equal(returns.later(cells, np.zeros(7))[7:], 2.0 * later[7:])  # not cached
    assert later[:20].max() < 0.2 * later[20:].min()
    waited = returns.later(cells[:1], np.array([4_000.0]))
    assert waited[0] > 2.0 * later[0]  # it did not come when it always had


def test_two_ids_at_one_place_of_the_table_are_both_remembered() -> None:
    """Of two popular ids, one was requested for the first time each time."""
    ids = np.arange(20_000)
    places = hashed(ids, 1).bits >> np.uint64(8) & np.uint64(63)  # a table for one row has 64 entries
    first, second, third = ids[places == 0][:3]
    returns = RowReturns(1)
    for number in range(30):
        returns.observe(batch_of(np.array([first, second]), 40 * number, 40 * number + 40))
    cells = returns.observe(batch_of(np.array([first, second, third]), 1_200, 1_240))
    assert cells[0] == cells[1] < cells[2]
    assert (returns.observe(batch_of(np.array([first, second]), 1_240, 1_280)) == cells[:2]).all()


def test_an_id_that_came_twice_is_not_taken_for_a_popular_one() -> None:
    """Most came twice by chance: with one mean gap, the id that was seen more often returns before."""
    returns = RowReturns(100)
    for number in range(40):
        twice = 1_000 + number // 2
        cells = returns.observe(batch_of(np.array([5, twice]), 40 * number, 40 * number + 40))
    often, seldom = cells // 5  # by the gap, in half-octaves
    assert often < seldom


def test_it_goes_on_learning_after_two_billion_samples() -> None:
    returns = RowReturns(200, settings=ReturnSettings(window=1_000, first_fit=2**31 + 2_000))
    returns._taken = 2**31 - 100  # which takes weeks
    hot = np.arange(20)
    for number in range(200):
        ids = np.concatenate((hot, np.arange(1000 + 20 * number, 1020 + 20 * number)))
        cells = returns.observe(batch_of(ids, 40 * number, 40 * number + 40))
    assert returns.fits >= 1
    later = returns.waits(cells)
    assert later[:20].max() < 0.2 * later[20:].min()
