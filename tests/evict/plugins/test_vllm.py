"""The plug-in for vLLM's CPU tier, driven in the order in which vLLM calls it."""

from __future__ import annotations

import gc
import math
import random
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gati import evict
from gati.errors import EvictError
from gati.evict.learn.following import LearningLink
from gati.evict.plugins import vllm as plugin
from gati.evict.plugins.settings import HINT, VARIABLE, PluginSettings, plugin_settings
from gati.evict.plugins.vllm import VllmEviction
from gati.evict.train import train
from tests.evict.naive import tree_trace
from tests.evict.plugins import vllm_recorded as engine
from tests.evict.plugins.shown import show
from tests.evict.strategies import long_trees
from tests.waiting import Clock, until

POLICIES = ("lru", "lfu", "fpb", "laru", "gati", "lpc", "laru+lpc")
TOKENS = 16
# what a request says of its conversation, and what is known then
HINTS = [
    *((share, {"continue": share}) for share in (0.9, 0, 0.3, 1)),
    *((wrong, {}) for wrong in (None, "often", 2.0, math.nan, True, [0.5])),
]


def key_of(block: int, group: int = 0) -> bytes:
    return engine.make_offload_key(block.to_bytes(8, "big"), group)


def context_of(name: str, *paths: list[bytes], hint: Any = None) -> engine.ReqContext:
    context = engine.ReqContext(name, None if hint is None else {HINT: hint})
    for path in paths:
        for place, key in enumerate(path):
            context.set_offload_key_position(key, (place + 1) * TOKENS)
    return context


def serve(
    manager: engine.CPUOffloadingManager, path: list[bytes], name: str = "request", hint: Any = None
) -> list[bytes]:
    """A request from begin to end; what was evicted for it."""
    context = context_of(name, path, hint=hint)
    hits = next(
        (place for place, key in enumerate(path) if not manager.lookup(key, context)),
        len(path),
    )
    if hits:
        manager.prepare_load(path[:hits], context)
        manager.complete_load(path[:hits], context)
    stored = manager.prepare_store(path[hits:], context)
    assert stored is not None
    manager.complete_store(stored[0], context)
    manager.on_request_finished(context)
    return stored[1]


def tier(
    blocks: int, policy: str = "gati", **given_settings: Any
) -> tuple[engine.CPUOffloadingManager, VllmEviction, Clock]:
    clock = Clock()
    made = VllmEviction(blocks, settings=PluginSettings(policy, **given_settings), clock=clock)
    return engine.CPUOffloadingManager(blocks, made), made, clock


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a predictor that has learned something, so that it does not follow ages only."""
    folder = tmp_path_factory.mktemp("predictor")
    chance = random.Random(1)
    rows = [[chance.choice((0, 0, 1, 2)) for _ in range(chance.randint(1, 8))] for _ in range(400)]
    train(tree_trace(rows), folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@given(long_trees, st.integers(8, 20))
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_it_evicts_what_a_prefix_cache_evicts(trained: str, policy: str, trace: Any, blocks: int) -> None:
    manager, _, clock = tier(blocks, policy, predictor=trained)
    reference = evict.PrefixCache(blocks, policy, predictor=trained, clock=clock)
    for number, row in enumerate(trace.requests):
        clock.now_s = float(number)
        path = [key_of(block) for block in row]
        hint, known = HINTS[number % len(HINTS)]
        match = reference.match(path)
        expected = reference.insert(match, known)
        reference.release(match)
        assert serve(manager, path, hint=hint) == expected


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "gati"])
@given(long_trees, st.integers(8, 30), st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_whatever_order_requests_come_in_its_books_are_the_engines(
    policy: str, trace: Any, blocks: int, seed: int
) -> None:
    """Requests interleave, store in pieces, fail, skip blocks that the GPU has, and have two groups."""
    chance = random.Random(seed)
    manager, made, clock = tier(blocks, policy)
    held: set[bytes] = set()
    under_way: list[tuple[engine.ReqContext, list[bytes], list[bytes]]] = []
    for number, row in enumerate(trace.requests):
        clock.now_s = float(number)
        paths = [[key_of(block, group) for block in row] for group in range(chance.randint(1, 2))]
        context = context_of(f"request {number}", *paths)
        keys = [key for path in paths for key in path[chance.randint(0, 2) :]]
        loads = [key for key in keys if manager.lookup(key, context)]
        if loads:
            manager.prepare_load(loads, context)
        under_way.append((context, [key for key in keys if key not in held], loads))
        chance.shuffle(under_way)
        while len(under_way) > 2 or (under_way and number == len(trace) - 1):
            context, rest, loads = under_way.pop()
            size = chance.randint(1, 3)
            if rest:
                stored = manager.prepare_store(rest[:size], context)
                if stored is not None:
                    held.difference_update(stored[1])
                    success = chance.random() < 0.8
                    manager.complete_store(stored[0], context, success)
                    held.update(stored[0] if success else ())
                under_way.insert(0, (context, rest[size:], loads))
            else:
                manager.complete_load(loads, context)
                manager.on_request_finished(context)
        assert {key for key in held if made.get(key) is None} == set()
        assert made.figures()["held"] == len(held)
    while held:  # nothing is in use any more, so that everything can leave
        some = made.evict(1, set())
        assert some is not None
        held.remove(some[0][0])
    assert made.figures()["held"] == 0


def test_what_cannot_be_evicted_changes_nothing() -> None:
    manager, made, _ = tier(6)
    serve(manager, [key_of(block) for block in (1, 2, 3)])
    serve(manager, [key_of(block) for block in (1, 2, 4, 5)])
    context = context_of("loading", [key_of(block) for block in (1, 2, 3)])
    manager.prepare_load([key_of(3)], context)
    assert made.evict(3, set()) is None  # 3 is read, 1 and 2 are above it, so that 4 and 5 are all there is
    assert made.evict(2, {key_of(5)}) is None
    assert {key for key, _ in made.evict(2, set()) or ()} == {key_of(4), key_of(5)}
    assert made.get(key_of(1)) is not None


def test_a_request_that_stores_in_pieces_is_one_access() -> None:
    manager, made, clock = tier(100, "lfu")
    path = [key_of(block) for block in range(6)]
    context = context_of("chunked", path)
    for begin in range(0, 6, 2):
        clock.now_s += 1.0
        stored = manager.prepare_store(path[begin : begin + 2], context)
        assert stored is not None
        manager.complete_store(stored[0], context)
        serve(manager, [key_of(100 + begin)])
        serve(manager, [key_of(100 + begin)])
    manager.on_request_finished(context)
    first = [(made.evict(1, set()) or [])[0][0] for _ in range(6)]
    assert first == list(reversed(path))  # used once, the others twice


def test_blocks_whose_prefix_is_not_held_leave_as_lru_has_it() -> None:
    manager, made, _ = tier(4, "lru")
    path = [key_of(block) for block in range(4)]
    context = context_of("the GPU had the first two", path)
    stored = manager.prepare_store(path[2:], context)
    assert stored is not None
    manager.complete_store(stored[0], context)
    manager.on_request_finished(context)
    serve(manager, [key_of(50)])
    assert made.figures()["strays"] == 2
    assert [key for key, _ in made.evict(1, set()) or ()] == [path[3]]
    serve(manager, path[:2])  # now the prefix is there
    serve(manager, path[:3])
    assert made.figures()["strays"] == 0


def test_a_reset_forgets_everything() -> None:
    manager, made, _ = tier(4)
    serve(manager, [key_of(block) for block in range(4)])
    manager.reset_cache()
    assert made.get(key_of(0)) is None
    assert made.figures()["held"] == 0
    assert serve(manager, [key_of(block) for block in range(4)]) == []


@pytest.mark.slow
def test_a_reset_ends_the_link_to_a_service(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    manager, made, _ = tier(4, service=str(tmp_path))
    before = weakref.ref(made._books)
    for number in range(5):
        serve(manager, [key_of(number)])
        manager.reset_cache()
    until(lambda: len(set(threading.enumerate()) - others) == 2)  # one logs, the other follows versions
    assert made._books.link is not None
    gc.collect()
    assert before() is None
    made._books.close()
    until(lambda: not set(threading.enumerate()) - others)


def test_a_reset_does_not_wait_for_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Event()
    close = LearningLink.close

    def slow(link: LearningLink) -> None:
        written.wait()
        close(link)

    monkeypatch.setattr(LearningLink, "close", slow)
    others = set(threading.enumerate())
    manager, made, _ = tier(4, service=str(tmp_path))
    manager.reset_cache()
    assert serve(manager, [key_of(1)]) == []
    written.set()
    made._books.close()
    until(lambda: not set(threading.enumerate()) - others)


@pytest.mark.parametrize("policy", ["gati", "laru", "fpb"])
def test_what_fitting_needs_is_checked_when_vllm_starts(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvictError, match="seed is -1; give a number from 0"):
        tier(4, policy, seed=-1)
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(EvictError, match="the predictor reuse needs LightGBM: pip install"):
        tier(4, policy)
    tier(4, "lru")


def test_vllm_gets_a_subclass_of_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its factory does: import the module, take the name from it, check the base, call it."""
    show(
        monkeypatch,
        {
            "vllm.v1.kv_offload.base": {"ReqContext": engine.ReqContext},
            "vllm.v1.kv_offload.cpu.policies.base": {"CachePolicy": engine.CachePolicy},
        },
    )
    monkeypatch.setenv(VARIABLE, '{"policy": "lru"}')
    plugin._policy_class.cache_clear()
    kind = plugin.GatiCachePolicy
    try:
        assert issubclass(kind, engine.CachePolicy)
        made = kind(cache_capacity=8)
        assert made.cache_capacity == 8
        assert serve(engine.CPUOffloadingManager(8, made), [key_of(1)]) == []
    finally:
        plugin._policy_class.cache_clear()


def test_settings_come_from_the_environment(tmp_path: Any) -> None:
    assert plugin_settings({}) == PluginSettings()
    file = tmp_path / "settings.json"
    file.write_text('{"policy": "lru", "seed": 3}')
    assert plugin_settings({VARIABLE: str(file)}) == PluginSettings("lru", seed=3)
    assert plugin_settings({VARIABLE: '{"cost_growth": 1}'}).cost_growth == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "neither a JSON object nor the path"),
        ("nowhere.json", "neither a JSON object nor the path"),
        (
            '{"policies": "lru"}',
            "unknown setting 'policies'; the settings are policy, predictor, seed, blocks, service",
        ),
        ('{"policy": "best"}', "unknown policy 'best'"),
        ('{"policy": "lmarker"}', "supports only independent blocks"),
        ('{"predictor": "oracle"}', "use reuse"),
        ('{"seed": true}', "seed must be a int"),
        ('{"seed": -1}', "seed is -1; give a number from 0"),
        ('{"seed": 4294967296}', "seed is 4294967296; give a number from 0 to 4294967295"),
        ('{"blocks": 0}', "give at least 1"),
        ('{"policy": "lpc-oracle"}', "needs a whole trace in advance; use lpc"),
        ('{"policy": "opt-leaf"}', "needs a whole trace in advance; use gati"),
        ('{"predictor": "learned", "service": "served"}', "either a predictor .* or a service, not both"),
        ('{"gap_s": "long"}', "gap_s must be a float, not 'long'"),
        ('{"gap_s": 0}', "give a time above zero"),
        ('{"cost_growth": -1}', "give a number from 0"),
        ('{"cost_growth": NaN}', "give a number from 0"),
    ],
)
def test_wrong_settings_are_told(text: str, message: str) -> None:
    with pytest.raises(EvictError, match=message):
        plugin_settings({VARIABLE: text})
