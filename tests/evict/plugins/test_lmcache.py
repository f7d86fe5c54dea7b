"""The plug-in for LMCache, driven in the order in which LMCache calls it."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

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
from gati.evict.predict.oracle import Noisy
from gati.evict.replays.replay import build
from gati.evict.trace.records import make_trace
from tests.evict.plugins import lmcache_recorded as engine
from tests.evict.strategies import long_trees


def backend(
    chunks: int, policy: str, **given_settings: Any
) -> tuple[engine.LocalCPUBackend, LmcacheEviction]:
    ticks = iter(range(10**9))
    made = LmcacheEviction(
        settings=PluginSettings(policy, **given_settings), clock=lambda: float(next(ticks))
    )
    return engine.LocalCPUBackend(chunks, made), made


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru"])
@pytest.mark.parametrize("told", [True, False], ids=["capacity told", "capacity found"])
@given(long_trees, st.integers(8, 20))
@settings(max_examples=12, deadline=None)
def test_it_evicts_what_a_prefix_cache_evicts(policy: str, told: bool, trace: Any, chunks: int) -> None:
    """These three never look at what comes, of which LMCache does not tell.

    The cache is full from the first request on, and every request ends in a chunk of its own: otherwise
    LMCache's calls do not show where requests end.
    """
    lmcache, _ = backend(chunks, policy, blocks=chunks if told else None)
    reference = evict.PrefixCache(chunks, policy)
    own = [[*row[: chunks - 1], 1_000 + number] for number, row in enumerate(trace.requests)]
    for row in [[-1 - block for block in range(chunks)], *own]:
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
        books = build("gati", capacity, lambda k, seed: Noisy(trace, 1.0), flat=flat, kind=EngineBooks)
        assert isinstance(books, EngineBooks)
        return books


@given(long_trees, st.integers(16, 24))
@settings(max_examples=40, deadline=None)
def test_the_guards_bound_holds_although_room_is_made_first(trace: Any, chunks: int) -> None:
    rows = tuple(tuple(row) for row in trace.requests)
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
    assert made.get_evict_candidates(lmcache.hot_cache, num_candidates=2) == [4, 3]  # and both stay
    assert set(made.get_evict_candidates(lmcache.hot_cache, num_candidates=9)) == {1, 2, 3, 4}


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


def test_costs_that_depend_on_prefixes_are_refused_when_lmcache_starts() -> None:
    with pytest.raises(EvictError, match="cost_growth needs to know which chunk follows which"):
        LmcacheEviction(settings=PluginSettings("gati", cost_growth=0.1))
