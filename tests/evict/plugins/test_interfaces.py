"""Engines of other versions: they say so when Gati's policy is chosen, and are left alone when it is not."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gati.errors import EvictError
from gati.evict.plugins import lmcache, sglang, vllm
from gati.evict.plugins.settings import VARIABLE
from tests.evict.plugins import lmcache_recorded, sglang_recorded, vllm_recorded
from tests.evict.plugins.shown import show


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Classes that were made for other stand-ins."""
    monkeypatch.setenv(VARIABLE, '{"policy": "lru"}')
    made: list[Any] = [vllm._policy_class, lmcache._policy_class, sglang._cache_class]
    for each in made:
        each.cache_clear()
    yield
    for each in made:
        each.cache_clear()


class OlderPolicy(vllm_recorded.CachePolicy):
    def insert(self, key: bytes, block: Any) -> None: ...  # type: ignore[override]


class NewerPolicy(vllm_recorded.CachePolicy):
    @abstractmethod
    def resize(self, cache_capacity: int) -> None: ...


class WithMoreHooks(vllm_recorded.CachePolicy):
    def on_chunk_promoted(self, key: bytes) -> None: ...


class WithoutHooks(ABC):  # noqa: B024 - of an early version
    get = vllm_recorded.CachePolicy.get
    insert = vllm_recorded.CachePolicy.insert
    remove = vllm_recorded.CachePolicy.remove
    touch = vllm_recorded.CachePolicy.touch


@dataclass
class WithoutPositions:
    """A context of which no prefixes are known: all blocks would be evicted as by LRU."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None

    def set_state(self, val: Any) -> None: ...

    def get_state(self, cls: type) -> Any: ...


def vllm_with(monkeypatch: pytest.MonkeyPatch, policy: type, context: type | None) -> type:
    show(
        monkeypatch,
        {
            "vllm.v1.kv_offload.base": {} if context is None else {"ReqContext": context},
            "vllm.v1.kv_offload.cpu.policies.base": {"CachePolicy": policy},
        },
    )
    kind: type = vllm.GatiCachePolicy
    return kind


@pytest.mark.parametrize(
    ("policy", "context", "difference"),
    [
        (OlderPolicy, vllm_recorded.ReqContext, r"its OlderPolicy\.insert has the parameters key, block"),
        (NewerPolicy, vllm_recorded.ReqContext, "its NewerPolicy asks for a method resize"),
        (WithoutHooks, vllm_recorded.ReqContext, "its WithoutHooks has no on_store_miss"),
        (vllm_recorded.CachePolicy, WithoutPositions, "its WithoutPositions has no _offload_key_positions"),
        (vllm_recorded.CachePolicy, None, "cannot import name 'ReqContext'.*"),
    ],
)
def test_another_vllm_is_refused_when_it_loads_the_policy(
    monkeypatch: pytest.MonkeyPatch, policy: type, context: type | None, difference: str
) -> None:
    with pytest.raises(
        EvictError, match=rf"^vllm .* does not fit Gati's plug-in: {difference}\. Install vllm 0\.33\.0"
    ):
        vllm_with(monkeypatch, policy, context)


def test_a_vllm_with_further_hooks_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    made = vllm_with(monkeypatch, WithMoreHooks, vllm_recorded.ReqContext)(4)
    assert isinstance(made, WithMoreHooks)
    manager = vllm_recorded.CPUOffloadingManager(4, made)
    context = vllm_recorded.ReqContext("one")
    key = vllm_recorded.make_offload_key(b"12345678", 0)
    context.set_offload_key_position(key, 16)
    assert manager.prepare_store([key], context) == ([key], [])


class OlderLmcachePolicy(lmcache_recorded.BaseCachePolicy):
    def update_on_put(self, key: Any, cache_dict: Any) -> None: ...  # type: ignore[override]


class NewerLmcachePolicy(lmcache_recorded.BaseCachePolicy):
    @abstractmethod
    def update_on_move(self, key: Any) -> None: ...


def lmcache_with(monkeypatch: pytest.MonkeyPatch, contents: dict[str, Any], base: dict[str, Any]) -> None:
    cache_policy = "lmcache.v1.storage_backend.cache_policy"
    show(monkeypatch, {cache_policy: contents, f"{cache_policy}.base_policy": base})
    monkeypatch.setattr(lmcache, "find_spec", lambda name: object())
    lmcache.register()


@pytest.mark.parametrize(
    ("base", "difference"),
    [
        (OlderLmcachePolicy, r"OlderLmcachePolicy\.update_on_put has the parameters key, cache_dict"),
        (NewerLmcachePolicy, "NewerLmcachePolicy asks for a method update_on_move"),
    ],
)
def test_another_lmcache_is_refused_when_it_makes_the_policy(
    monkeypatch: pytest.MonkeyPatch, base: type, difference: str
) -> None:
    """Not when vLLM starts: LMCache may be there for its other policies."""
    table: dict[str, Callable[[], Any]] = {}
    lmcache_with(monkeypatch, {"POLICY_MAPPING": table}, {"BaseCachePolicy": base})
    with pytest.raises(EvictError, match=rf"^lmcache .* its {difference}\. Install lmcache 0\.5\.6"):
        table["GATI"]()


@pytest.mark.parametrize(
    "contents", [{}, {"POLICY_MAPPING": {}}], ids=["without the table", "without the base"]
)
def test_an_lmcache_without_its_parts_does_not_keep_vllm_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, contents: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING, "gati.evict"):
        lmcache_with(monkeypatch, contents, {})
    assert "LMCache has no policy GATI, which was written for version 0.5.6: cannot import" in caplog.text


def test_an_lmcache_that_cannot_be_looked_for_does_not_keep_vllm_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`find_spec` raises for a module that something put in place without a specification."""
    module = ModuleType("lmcache")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "lmcache", module)
    with caplog.at_level(logging.WARNING, "gati.evict"):
        lmcache.register()
    assert "LMCache has no policy GATI, which was written for version 0.5.6: lmcache.__spec__" in caplog.text


class OlderCache(sglang_recorded.UnifiedRadixCache):
    def evict(self, num_tokens: int, callback: Any) -> Any: ...  # type: ignore[override]


class WithoutPriorities(sglang_recorded.UnifiedRadixCache):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        del self.tree_core.eviction_strategy


def sglang_made(monkeypatch: pytest.MonkeyPatch, cache: type, **params: Any) -> Any:
    show(
        monkeypatch,
        {
            "sglang.srt.mem_cache.registry": {
                "create_unified_radix_cache": lambda ctx, *, cache_class: cache_class(ctx.params),
                "default_radix_cache_factory": lambda ctx: None,
            },
            "sglang.srt.mem_cache.unified_radix_cache": {"UnifiedRadixCache": cache},
        },
    )
    given = SimpleNamespace(page_size=1, token_to_kv_pool_allocator=SimpleNamespace(size=8), **params)
    return sglang.make_cache(SimpleNamespace(params=given, tp_size=1, disable_radix_cache=False))


@pytest.mark.parametrize(
    ("cache", "params", "difference"),
    [
        (OlderCache, {"tree_core_backend": None}, r"its OlderCache\.evict has the parameters num_tokens"),
        (WithoutPriorities, {"tree_core_backend": None}, "its SimpleNamespace has no eviction_strategy"),
        (sglang_recorded.UnifiedRadixCache, {}, "its SimpleNamespace has no tree_core_backend"),
    ],
)
def test_another_sglang_is_refused_when_it_makes_the_cache(
    monkeypatch: pytest.MonkeyPatch, cache: type, params: dict[str, Any], difference: str
) -> None:
    with pytest.raises(EvictError, match=rf"^sglang .*: {difference}.*\. Install sglang 0\.5\.23"):
        sglang_made(monkeypatch, cache, **params)


def test_an_sglang_whose_factory_has_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, {"sglang.srt.mem_cache.registry": {}})
    with pytest.raises(EvictError, match=r"^sglang .*create_unified_radix_cache.*Install sglang 0\.5\.23"):
        sglang.make_cache(None)
