"""The plug-in for LMCache, driven in the order in which LMCache calls it."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati import evict
from gati.errors import EvictError
from gati.evict.plugins import lmcache as plugin
from gati.evict.plugins.books import EngineBooks
from gati.evict.plugins.lmcache import LmcacheEviction
from gati.evict.plugins.settings import VARIABLE, PluginSettings
from gati.evict.policy.guard import Gati
from gati.evict.policy.registry import make_policy
from gati.evict.predict.oracle import Noisy
from gati.evict.trace.records import make_trace
from tests.evict.plugins import lmcache_recorded as engine
from tests.evict.strategies import long_trees

pytestmark = pytest.mark.slow


def backend(
    chunks: int, policy: str, **given_settings: Any
) -> tuple[engine.LocalCPUBackend, LmcacheEviction]:
    ticks = iter(range(10**9))
    made = LmcacheEviction(
        settings=PluginSettings(policy, **given_settings), clock=lambda: float(next(ticks))
    )
    return engine.LocalCPUBackend(chunks, made), made


def after_filling(chunks: int, requests: list[list[int]]) -> list[list[int]]:
    """Requests that fill the cache one chunk at a time, then these, each with a chunk of its own at the end.

    Otherwise LMCache's calls do not show where requests end.
    """
    own = [[*row[: chunks - 1], 1_000 + number] for number, row in enumerate(requests)]
    return [*([-1 - number] for number in range(chunks)), *own]


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru"])
@pytest.mark.parametrize("told", [True, False], ids=["capacity told", "capacity found"])
@given(long_trees, st.integers(8, 20))
@settings(max_examples=12, deadline=None)
def test_it_evicts_what_a_prefix_cache_evicts(policy: str, told: bool, trace: Any, chunks: int) -> None:
    """These three never look at what comes, of which LMCache does not tell."""
    lmcache, _ = backend(chunks, policy, blocks=chunks if told else None)
    reference = evict.PrefixCache(chunks, policy)
    for row in after_filling(chunks, trace.requests):
        match = reference.match(row)
        expected = reference.insert(match)
        reference.release(match)
        assert set(lmcache.serve(row)) == set(expected)


@pytest.mark.parametrize("policy", ["lru", "fpb", "gati"])
@given(long_trees, st.integers(8, 20), st.integers(0, 999))
@settings(max_examples=12, deadline=None)
def test_its_books_are_the_engines(policy: str, trace: Any, chunks: int, seed: int) -> None:
    """Chunks are removed by others, pinned for longer, and put without the policy having been asked."""
    chance = random.Random(seed)
    lmcache, made = backend(chunks, policy)
    pinned: list[int] = []
    for row in trace.requests:
        lmcache.serve(row)
        if lmcache.hot_cache and chance.random() < 0.2:
            gone = chance.choice(list(lmcache.hot_cache))
            lmcache.remove(gone)
            pinned = [key for key in pinned if key != gone]
        if pinned and chance.random() < 0.5:
            lmcache.unpin(pinned.pop())
        elif lmcache.hot_cache and len(pinned) < 3:
            pinned.append(chance.choice(list(lmcache.hot_cache)))
            lmcache.contains(pinned[-1], pin=True)
    for key in pinned:
        lmcache.unpin(key)
    left = set(lmcache.hot_cache)
    while left:
        keys = made.get_evict_candidates(lmcache.hot_cache)
        assert keys
        left.difference_update(keys)
        for key in keys:
            del lmcache.hot_cache[key]
    assert made.get_evict_candidates(lmcache.hot_cache) == []


@dataclass(frozen=True)
class Hostile(PluginSettings):
    """Books whose predictor says the opposite of what will be."""

    rows: tuple[tuple[int, ...], ...] = ()

    def books(self, capacity: int, *, flat: bool = False) -> EngineBooks:
        trace = make_trace([list(row) for row in self.rows], kind="flat")
        return EngineBooks(make_policy("gati", capacity, lambda k, seed: Noisy(trace, 1.0), flat=flat))


@given(long_trees, st.integers(16, 24))
@settings(max_examples=40, deadline=None)
def test_the_guards_bound_holds_although_room_is_made_first(trace: Any, chunks: int) -> None:
    rows = tuple(tuple(row) for row in after_filling(chunks, trace.requests))
    made = LmcacheEviction(settings=Hostile(rows=rows, blocks=chunks), clock=lambda: 0.0)
    lmcache = engine.LocalCPUBackend(chunks, made)
    requested = 0
    for row in rows:
        lmcache.serve(list(row))
        made.update_on_force_evict(-1)  # nothing, but it lets the policy count what it was told
        requested += len(row)
        policy = made._books.policy  # type: ignore[union-attr]
        assert isinstance(policy, Gati)
        # an eviction is decided before its request is counted, so that the guard may act one request late
        assert policy.excess <= evict.bound(requested, chunks, 2 * 8)


def test_a_batch_that_is_not_evicted_is_taken_back() -> None:
    lmcache, made = backend(4, "lru")
    lmcache.serve([1, 2, 3, 4])
    assert made.get_evict_candidates(lmcache.hot_cache, num_candidates=2) == [1, 2]  # and both stay
    assert made.get_evict_candidates(lmcache.hot_cache, num_candidates=9) == [3, 4, 1, 2]


@pytest.mark.parametrize("told", [True, False], ids=["capacity told", "capacity found"])
@pytest.mark.parametrize("policy", ["lru", "gati"])
def test_without_hits_the_oldest_requests_leave_first(policy: str, told: bool) -> None:
    """All of them are put before room is needed for the first time."""
    lmcache, _ = backend(6, policy, blocks=6 if told else None)
    for row in ([1, 2], [3, 4], [5, 6]):
        lmcache.serve(row)
    assert lmcache.serve([7, 8]) == [1, 2]
    assert lmcache.serve([9, 10]) == [3, 4]


def test_chunks_that_are_removed_before_room_is_needed_cost_no_time() -> None:
    """All that was remembered was gone through for each of them, 0.3 s under LMCache's lock."""
    lmcache, made = backend(100_000, "lru")
    for key in range(2_000):
        lmcache.serve([key])
    made.update_on_force_evict(-1)
    before = made._before
    for key in range(1, 2_000):
        lmcache.remove(key)
    assert made._before is before
    lmcache.serve([1])  # it is back
    lmcache.serve([2_000])
    assert [made.get_evict_candidates(lmcache.hot_cache) for _ in range(4)] == [[0], [1], [2_000], [0]]
    assert made.figures()["held"] == 2 and not made._removed


def test_chunks_that_were_removed_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_REMEMBERED", 10)
    lmcache, made = backend(100_000, "lru")
    for key in range(100):
        lmcache.serve([key])
        if key % 2:
            lmcache.remove(key)
        assert len(made._before) <= 10 and len(made._removed) <= 10


def test_puts_after_a_hit_may_belong_to_another_request() -> None:
    lmcache, _ = backend(4, "lru")
    for row in ([1, 2], [1, 3], [4]):
        lmcache.serve(row)
    assert [lmcache.serve([block]) for block in (5, 6, 7)] == [[2], [1], [3]]


def test_hits_of_chunks_that_were_put_one_by_one_are_one_access() -> None:
    lmcache, made = backend(9, "lru", blocks=9)
    rows = ([1, 2, 3], [4, 5], [6])
    for row in rows:
        lmcache.serve(row)
    assert made._books is not None
    made.update_on_force_evict(-1)  # nothing, but it lets the policy count what it was told
    counted: list[tuple[list[int], int]] = []
    made._books.watch = lambda ids, hits, time_s: counted.append((ids, hits))
    for row in rows:
        lmcache.serve(row)
    made.update_on_force_evict(-1)
    assert counted == [(row, len(row)) for row in rows]


@pytest.mark.parametrize("in_use", [True, False])
def test_chunks_that_lmcache_keeps_are_no_misses(in_use: bool) -> None:
    """They are in use, or it wanted fewer than it was offered."""
    lmcache, made = backend(4, "gati", blocks=4)
    lmcache.serve([1, 2, 3, 4])
    if in_use:
        for key in (1, 2):
            lmcache.hot_cache[key].pins += 1
    counted: list[list[int]] = []
    assert made._books is not None
    made.get_evict_candidates(lmcache.hot_cache, num_candidates=1)
    made._books.watch = lambda ids, hits, time_s: counted.append(ids)
    offered = made.get_evict_candidates(lmcache.hot_cache, num_candidates=2)
    assert counted == []
    made.get_evict_candidates(lmcache.hot_cache, num_candidates=0)
    assert offered == ([3, 4] if in_use else [1, 2])
    assert counted == []
    assert made.figures()["held"] == 4
    assert lmcache.serve([1, 2, 3, 4]) == []
    made.update_on_force_evict(-1)
    assert counted == [[1, 2, 3, 4]]
    assert made.figures()["guard"]["excess"] == 0


class Named:
    """A predictor that stores for every slot which block it predicts for."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.block_of: dict[int, int] = {}

    def observe(self, ids: list[int], request: int, time_s: float) -> list[int]:
        self.ids = ids
        return list(range(1, len(ids) + 1))

    def assign(self, slot: int, stretch: int) -> None:
        self.block_of[slot] = self.ids[stretch]

    def copy(self, source: int, target: int) -> None:
        self.block_of[target] = self.block_of[source]

    def scores(self, count: int) -> Any:
        return np.array([self.block_of.get(slot, 0) * 7919 % 101 for slot in range(count)], dtype=float)

    def figures(self) -> dict[str, Any]:
        return {}


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 99), st.booleans())
@settings(max_examples=60, deadline=None)
def test_chunks_that_are_kept_keep_their_predictions(kept: list[bool], seed: int, later: bool) -> None:
    """Whichever are kept; if others were stored meanwhile, they are evicted as by LRU."""
    books = EngineBooks(make_policy("fpb", 12, lambda capacity, seed: Named(), flat=True))
    assert isinstance(books.predictor, Named)
    blocks = random.Random(seed).sample(range(1, 1_000), 12)
    serve(books, blocks)
    victims = books.victims(len(kept)) or []
    if later:
        serve(books, [2_000])
    back = [block for block, stays in zip(victims, kept, strict=True) if stays]
    books.take_back(back)
    left = {block for block, stays in zip(victims, kept, strict=True) if not stays}
    assert {block for block in blocks if block in books} == set(blocks) - left
    assert books.figures()["strays"] == (len(back) if later else 0)
    for run in books.tree:
        assert books.predictor.block_of[run.slot] == run.ids[0]


def serve(books: EngineBooks, ids: list[int]) -> None:
    books.begin(ids, 0.0)
    books.stored(ids)
    books.finish()


def test_lmcache_finds_it_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ModuleType("lmcache.v1.storage_backend.cache_policy.base_policy")
    base.BaseCachePolicy = engine.BaseCachePolicy  # type: ignore[attr-defined]
    parts = base.__name__.split(".")
    for length in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(".".join(parts[:length])))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    table: dict[str, type] = {}
    sys.modules["lmcache.v1.storage_backend.cache_policy"].POLICY_MAPPING = table  # type: ignore[attr-defined]
    monkeypatch.setattr(plugin, "find_spec", lambda name: object())
    monkeypatch.setenv(VARIABLE, '{"policy": "lru"}')
    plugin._policy_class.cache_clear()
    try:
        plugin.register()
        made = table["GATI"]()
        assert isinstance(made, engine.BaseCachePolicy)
        assert engine.LocalCPUBackend(1, made).serve([1]) == []
    finally:
        plugin._policy_class.cache_clear()


def test_without_lmcache_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    plugin.register()
    assert "lmcache" not in sys.modules


def test_a_policy_that_needs_prefixes_is_refused_when_lmcache_starts() -> None:
    with pytest.raises(
        EvictError, match="policy lpc needs to know which chunk follows which, which LMCache does not report"
    ):
        LmcacheEviction(settings=PluginSettings("lpc"))


def test_a_service_is_refused_when_lmcache_starts(tmp_path: Path) -> None:
    with pytest.raises(EvictError, match="a service needs to know which .* not report: leave out service"):
        LmcacheEviction(settings=PluginSettings("gati", service=str(tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("blocks", [None, 8], ids=["capacity found", "capacity told"])
def test_what_fitting_needs_is_checked_when_lmcache_starts(
    blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EvictError, match="seed is -1; give a number from 0"):
        LmcacheEviction(settings=PluginSettings("gati", seed=-1, blocks=blocks))
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(EvictError, match="the predictor reuse needs LightGBM: pip install"):
        LmcacheEviction(settings=PluginSettings("gati", blocks=blocks))
    LmcacheEviction(settings=PluginSettings("lru", blocks=blocks))


def test_costs_that_depend_on_prefixes_are_refused_when_lmcache_starts() -> None:
    with pytest.raises(EvictError, match="cost_growth needs to know which chunk follows which"):
        LmcacheEviction(settings=PluginSettings("gati", cost_growth=0.1))
