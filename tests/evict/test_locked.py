"""The guard's promise while several requests are active, whose blocks are locked."""

from __future__ import annotations

import random

import pytest

from gati.evict.cache import BlockCache, Handle
from gati.evict.policy.guard import Gati, bound
from tests.evict.naive import Scripted, build
from tests.evict.test_guard import hostile_instance


def guarded(capacity: int, said: object, *, flat: bool) -> tuple[BlockCache, Gati]:
    cache = build("gati", capacity, lambda capacity, seed: Scripted(said), flat=flat)  # type: ignore[arg-type]
    assert isinstance(cache.policy, Gati)
    return cache, cache.policy


def serve(cache: BlockCache, ids: list[int], time_s: float) -> Handle:
    handle = cache.match(ids)
    cache.insert(handle, time_s)
    return handle


def test_a_request_that_stays_active_does_not_break_the_bound() -> None:
    """Most of the cache is locked, and LRU itself misses nearly everything."""
    capacity, longest = 200, 120
    cache, policy = guarded(capacity, lambda number, block: 0.0, flat=False)
    lru = build("lru", capacity, None)
    chance = random.Random(0)
    requested, missed = longest, [0, 0]
    for each in (cache, lru):
        serve(each, list(range(10_000, 10_000 + longest)), 0.0)
    for number in range(3_000):
        first = 2 * chance.randrange(90)  # 180 blocks for the other 80 places
        requested += 2
        for place, each in enumerate((cache, lru)):
            handle = serve(each, [first, first + 1], float(number))
            missed[place] += 2 - handle.hits
            each.release(handle)
        assert policy.excess <= bound(requested, capacity, longest)
    assert missed[0] - missed[1] <= bound(requested, capacity, longest)
    assert missed[1] > 0.5 * requested


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_the_bound_holds_on_hostile_instances_whatever_is_locked(seed: int) -> None:
    trace, capacity, said = hostile_instance(seed, requests=400)
    cache, policy = guarded(capacity, said, flat=trace.kind == "flat")
    chance = random.Random(seed)
    longest = int(trace.lengths.max())
    active: list[Handle] = []
    requested = 0
    for number, row in enumerate(trace.requests):
        active.append(cache.match(row))
        while True:
            handle = active[chance.randrange(len(active))]
            try:
                cache.insert(handle, float(number))
            except Exception:  # too much is locked
                cache.release(active.pop(chance.randrange(len(active))))
                if not active:
                    break
                continue
            requested += len(handle.ids)
            break
        assert policy.excess <= bound(requested, capacity, longest)
        while active and chance.random() < 0.4:
            cache.release(active.pop(chance.randrange(len(active))))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_without_other_requests_lru_evicts_nothing_that_the_shadow_holds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So locks alone change what the guard compares with."""
    trace, capacity, said = hostile_instance(seed, requests=400)
    cache, policy = guarded(capacity, said, flat=trace.kind == "flat")
    for number, row in enumerate(trace.requests):
        cache.release(serve(cache, row, float(number)))
        assert not policy._shadow._gone
