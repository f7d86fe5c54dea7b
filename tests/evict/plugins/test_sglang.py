"""The plug-in for SGLang, driven in the order in which SGLang calls its radix cache."""

from __future__ import annotations

import json
import random
import sys
import threading
from array import array
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati import evict
from gati.errors import EvictError
from gati.evict.plugins import sglang as plugin
from gati.evict.plugins.settings import HINT, VARIABLE
from gati.evict.plugins.sglang import SglangEviction
from tests.evict.plugins import sglang_recorded as engine
from tests.evict.strategies import long_trees
from tests.waiting import until

pytestmark = pytest.mark.slow


class Cache(SglangEviction, engine.UnifiedRadixCache):
    """As the plug-in makes it."""


def made(
    pages: int,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
    page: int = 1,
    clock: Any = lambda: 0.0,
    service: Path | None = None,
) -> Cache:
    given = {"policy": policy} | ({} if service is None else {"service": str(service)})
    monkeypatch.setenv(VARIABLE, json.dumps(given))
    allocator = SimpleNamespace(size=pages * page)
    return Cache(SimpleNamespace(page_size=page, token_to_kv_pool_allocator=allocator), clock=clock)


def key_of(row: list[int], page: int = 1) -> engine.RadixKey:
    return engine.RadixKey(array("q", [token for block in row for token in [block] * page]))


def look_up(cache: Cache, row: list[int], page: int = 1, hint: float | None = None) -> Any:
    sampling = SimpleNamespace(custom_params=None if hint is None else {HINT: hint})
    request = SimpleNamespace(sampling_params=sampling)
    return cache.match_prefix(engine.MatchPrefixParams(key_of(row, page), req=request))


def serve(cache: Cache, row: list[int], pages: int, page: int = 1, hint: float | None = None) -> set[int]:
    """One request alone: match and lock, make room, insert, unlock. What left."""
    match = look_up(cache, row, page, hint)
    cache.inc_lock_ref(match.last_device_node)
    before = cache.held()
    need = len(row) * page - match.device_prefix_len + len(before) * page - pages * page
    if need > 0:
        cache.evict(engine.EvictParams(need))
    gone = before - cache.held()
    cache.dec_lock_ref(match.last_device_node, None)
    cache.store(key_of(row, page))
    return gone


def counted_by(cache: Cache) -> list[tuple[int, int]]:
    """Fills with the pages and hits of every request that is counted from now on."""
    found: list[tuple[int, int]] = []
    cache._books.watch = lambda ids, hits, time_s: found.append((len(ids), hits))
    return found


@pytest.mark.parametrize("policy", ["lru", "lfu", "fpb", "laru", "gati", "lpc"])
@pytest.mark.parametrize("page", [1, 3])
@given(long_trees, st.integers(8, 20))
@settings(max_examples=10, deadline=None)
def test_it_evicts_what_a_prefix_cache_evicts(policy: str, page: int, trace: Any, pages: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        now_s = [0.0]
        cache = made(pages, policy, patch, page, lambda: now_s[0])
        reference = evict.PrefixCache(pages, policy, clock=lambda: now_s[0])
        for number, row in enumerate(trace.requests):
            now_s[0] = float(number)
            match = reference.match(row)
            hint = (None, 0.2, 0.9)[number % 3]
            expected = reference.insert(match, {} if hint is None else {"continue": hint})
            reference.release(match)
            assert serve(cache, row, pages, page, hint) == set(expected)
            assert cache.figures()["held"] == len(cache.held())


@pytest.mark.parametrize("policy", ["lru", "gati"])
@given(long_trees, st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_with_requests_under_way_it_frees_what_is_asked(policy: str, trace: Any, seed: int) -> None:
    """Requests hold paths for a while, go on with what they stored, and room is made for several at once."""
    chance = random.Random(seed)
    pages = 24
    with pytest.MonkeyPatch.context() as patch:
        cache = made(pages, policy, patch)
        locked: list[int] = []
        for row in trace.requests:
            match = look_up(cache, row)
            cache.inc_lock_ref(match.last_device_node)
            if chance.random() < 0.3:
                look_up(cache, chance.choice(trace.requests))
            need = len(row) - match.device_prefix_len + len(cache.held()) - pages
            room = sum(not locks for locks in held_locks(cache))
            if need > 0:
                freed = cache.evict(engine.EvictParams(need)).num_tokens_evicted
                assert freed >= min(need, room)
            first = chance.randint(1, len(row))
            cache.store(key_of(row[:first]))
            cache.store(key_of(row), inserted_len=first)
            locked.append(match.last_device_node)
            if len(locked) > 2:
                cache.dec_lock_ref(locked.pop(0), None)
        for node in locked:
            cache.dec_lock_ref(node, None)
        while cache.held():
            assert cache.evict(engine.EvictParams(1)).num_tokens_evicted >= 1


def held_locks(cache: Cache) -> list[int]:
    return [node.locks for node in cache.arena.values() if node.key for _ in node.key.token_ids]


@pytest.mark.parametrize("before", [[], [1, 2, 3]], ids=["new", "its beginning is there"])
def test_room_for_what_a_request_generates_does_not_count_it_again(
    before: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = made(8, "gati", monkeypatch)
    serve(cache, [*before, 20, 21], 8)
    serve(cache, [30, 31], 8)
    counted = counted_by(cache)
    request = [1, 2, 3, 4, 5]
    node = look_up(cache, request).last_device_node
    cache.inc_lock_ref(node)
    cache.evict(engine.EvictParams(2))
    cache.store(key_of(request))
    cache.evict(engine.EvictParams(1))  # for the first tokens of the answer
    cache.store(key_of([*request, 6]), inserted_len=5)
    cache.evict(engine.EvictParams(1))
    assert counted == [(5, len(before))]
    assert cache.figures()["guard"]["excess"] == 0


def test_a_long_prompt_that_is_stored_in_parts_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = made(8, "gati", monkeypatch)
    serve(cache, [20, 21, 22, 23, 24, 25], 8)
    counted = counted_by(cache)
    request = [1, 2, 3, 4, 5]
    look_up(cache, request)
    cache.evict(engine.EvictParams(1))
    cache.store(key_of(request[:3]))
    cache.evict(engine.EvictParams(2))
    cache.store(key_of(request), inserted_len=3)
    cache.evict(engine.EvictParams(1))
    assert counted == [(5, 0)]


def test_a_reset_forgets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = made(8, "gati", monkeypatch)
    serve(cache, [1, 2, 3], 8)
    cache.reset()
    assert cache.figures()["held"] == 0


def test_a_reset_ends_the_link_to_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's cache also resets itself once while it is made."""
    others = set(threading.enumerate())
    cache = made(8, "gati", monkeypatch, service=tmp_path)
    for _ in range(3):
        cache.reset()
    until(lambda: len(set(threading.enumerate()) - others) == 2)
    cache._books.close()
    until(lambda: not set(threading.enumerate()) - others)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang's registry of backends, and what it makes of a context."""
    module = ModuleType("sglang.srt.mem_cache.registry")
    table: dict[str, Any] = {}
    module.__dict__.update(
        register_radix_cache_backend=table.__setitem__,
        registered_radix_cache_backends=lambda: list(table),
        create_unified_radix_cache=lambda ctx, *, cache_class: cache_class(ctx.params),
        default_radix_cache_factory=lambda ctx: "SGLang's own",
    )
    unified = ModuleType("sglang.srt.mem_cache.unified_radix_cache")
    unified.UnifiedRadixCache = engine.UnifiedRadixCache  # type: ignore[attr-defined]
    parts = module.__name__.split(".")
    for length in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(".".join(parts[:length])))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, unified.__name__, unified)
    plugin._cache_class.cache_clear()
    plugin.register()
    plugin.register()  # once in every process is enough, and twice does no harm
    return table


def context(tp_size: int = 1, disable: bool = False) -> Any:
    allocator = SimpleNamespace(size=8)
    params = SimpleNamespace(page_size=1, token_to_kv_pool_allocator=allocator, tree_core_backend=None)
    return SimpleNamespace(params=params, tp_size=tp_size, disable_radix_cache=disable)


def test_sglang_finds_it_by_its_name(registry: dict[str, Any]) -> None:
    asked = context()
    cache = registry["gati"](asked)
    assert isinstance(cache, engine.UnifiedRadixCache)
    assert asked.params.tree_core_backend == "python"
    assert serve(cache, [1, 2], 8) == set()
    assert registry["gati"](context(disable=True)) == "SGLang's own"


def test_ranks_that_could_differ_are_refused(
    registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EvictError, match="2 ranks could evict different pages: serve with --tp-size 1"):
        registry["gati"](context(tp_size=2))
    monkeypatch.setenv(VARIABLE, '{"policy": "lru"}')
    assert isinstance(registry["gati"](context(tp_size=2)), engine.UnifiedRadixCache)
