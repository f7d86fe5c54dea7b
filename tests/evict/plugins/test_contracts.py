"""What the plug-ins rely on, compared with the engines themselves where they are installed.

To compare with engines that are not: unpack their wheels into a folder and put that on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from gati import evict
from gati.evict.plugins import vllm as plugin
from gati.evict.plugins.interfaces import WRITTEN_FOR
from gati.evict.plugins.lmcache import LmcacheEviction
from gati.evict.plugins.settings import VARIABLE
from gati.evict.plugins.sglang import SglangEviction
from gati.evict.plugins.vllm import VllmEviction
from tests.evict.naive import tree_trace
from tests.evict.plugins import lmcache_recorded, sglang_recorded, vllm_recorded
from tests.evict.plugins.signatures import RECORDED, signatures, source_of

ENGINES = json.loads(RECORDED.read_text(encoding="utf-8"))
FILES = [(engine, path) for engine, known in ENGINES.items() for path in known["files"]]
VLLM_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"


def names_of(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def recorded(engine: str, name: str) -> list[str]:
    found = [known[name] for known in ENGINES[engine]["files"].values() if name in known]
    assert len(found) == 1
    return [each.rstrip("=") for each in found[0].split(", ") if each not in ("self", "*")]


def test_errors_name_the_recorded_versions() -> None:
    assert {engine: known["version"] for engine, known in ENGINES.items()} == WRITTEN_FOR


@pytest.mark.parametrize(("engine", "path"), FILES)
def test_the_engine_has_what_was_recorded(engine: str, path: str) -> None:
    source = source_of(path)
    if source is None:
        pytest.skip(f"{engine} is not installed; recorded from {ENGINES[engine]['version']}")
    known = ENGINES[engine]["files"][path]
    assert signatures(source, list(known)) == known


@pytest.mark.parametrize(
    "method", [name for name in vars(vllm_recorded.CachePolicy) if not name.startswith("_")]
)
def test_vllms_policy_has_the_recorded_parameters(method: str) -> None:
    asked = recorded("vllm", f"CachePolicy.{method}")
    assert names_of(getattr(VllmEviction, method)) == asked
    assert names_of(getattr(vllm_recorded.CachePolicy, method)) == asked


@pytest.mark.parametrize(
    "method", [name for name in vars(lmcache_recorded.BaseCachePolicy) if not name.startswith("_")]
)
def test_lmcaches_policy_has_the_recorded_parameters(method: str) -> None:
    asked = recorded("lmcache", f"BaseCachePolicy.{method}")
    assert names_of(getattr(LmcacheEviction, method)) == asked
    assert names_of(getattr(lmcache_recorded.BaseCachePolicy, method)) == asked


@pytest.mark.parametrize("method", ["match_prefix", "insert", "evict", "reset"])
def test_sglangs_cache_has_the_recorded_parameters(method: str) -> None:
    assert names_of(getattr(SglangEviction, method)) == recorded("sglang", f"UnifiedRadixCache.{method}")


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("vllm", vllm_recorded.CPUOffloadingManager),
        ("vllm", vllm_recorded.ReqContext),
        ("sglang", sglang_recorded.UnifiedRadixCache),
        ("sglang", sglang_recorded.RadixKey),
    ],
)
def test_stand_ins_have_the_recorded_parameters(engine: str, kind: type) -> None:
    own = {"cut", "held", "store"}  # what the stand-ins need themselves
    for name, method in vars(kind).items():
        if callable(method) and not name.startswith("_") and name not in own:
            assert names_of(method) == recorded(engine, f"{kind.__name__}.{name}")


@pytest.fixture
def vllm_manager() -> Iterator[Any]:
    """vLLM's own manager. Its metrics pull in all of vLLM, which not every machine can import."""
    before = set(sys.modules)
    name = "vllm.v1.kv_offload.cpu.manager"
    if source_of("vllm/v1/kv_offload/cpu/manager.py") is None:
        pytest.skip("vllm is not installed")
    try:
        try:
            module = importlib.import_module(name)
        except (ImportError, RuntimeError):
            without_metrics()
            try:
                module = importlib.import_module(name)
            except (ImportError, RuntimeError) as error:
                pytest.skip(f"vllm cannot be imported here: {error}")
        plugin._policy_class.cache_clear()
        yield module
    finally:
        plugin._policy_class.cache_clear()
        for added in set(sys.modules) - before:
            if added.split(".")[0] == "vllm":
                del sys.modules[added]


def without_metrics() -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == "vllm"]:
        del sys.modules[name]
    parts = VLLM_METRICS.split(".")
    for length in range(2, len(parts) + 1):
        module = ModuleType(".".join(parts[:length]))
        module.__path__ = []
        sys.modules[module.__name__] = module
    sys.modules[VLLM_METRICS].OffloadingConnectorStats = object  # type: ignore[attr-defined]
    state = ModuleType("vllm.distributed.parallel_state")  # the logger asks it
    state.is_local_first_rank = state.is_global_first_rank = lambda: True  # type: ignore[attr-defined]
    sys.modules[state.__name__] = state


@pytest.mark.parametrize("policy", ["lru", "laru", "gati"])
def test_vllms_own_manager_evicts_what_a_prefix_cache_evicts(
    vllm_manager: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"policy": policy}))
    base = importlib.import_module("vllm.v1.kv_offload.base")
    chance = random.Random(5)
    rows = [[chance.randint(0, 2) for _ in range(chance.randint(1, 8))] for _ in range(150)]
    manager = vllm_manager.CPUOffloadingManager(12, "GatiCachePolicy", "gati.evict.plugins.vllm")
    reference = evict.PrefixCache(12, policy)
    evictions = 0
    for number, row in enumerate(tree_trace(rows).requests):
        path = [base.make_offload_key(block.to_bytes(8, "big"), 0) for block in row]
        match = reference.match(path)
        expected = reference.insert(match)
        reference.release(match)
        context = base.ReqContext(req_id=str(number))
        for place, key in enumerate(path):
            context.set_offload_key_position(key, 16 * (place + 1))
        manager.on_new_request(context)
        hits = 0
        while hits < len(path) and manager.lookup(path[hits], context) is base.LookupResult.HIT:
            hits += 1
        if hits:
            manager.prepare_load(path[:hits], context)
            manager.complete_load(path[:hits], context)
        stored = manager.prepare_store(path[hits:], context)
        assert stored.evicted_keys == expected
        manager.complete_store(stored.keys_to_store, context)
        manager.on_request_finished(context)
        evictions += len(expected)
    assert evictions > 100
