"""Ctrl-C, anywhere in a batch, leaves no cache with wrong rows."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gati.evict.embed.cache import EmbeddingCache
from gati.evict.embed.pool import PagePool
from gati.evict.embed.tiers import MemoryTier
from tests.evict.embed.test_cache import PAGE, bag, same_bits, skewed, table
from tests.waiting import returns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

_CODE = "gati/evict/embed/"


def in_a_thread(test: Callable[..., None]) -> Callable[..., None]:
    """Torch's modes belong to a thread: one that an interruption leaves switched ends with it."""

    @wraps(test)
    def run(**given: Any) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(test, **given).result()

    return run


@contextmanager
def interrupted(after: int) -> Iterator[None]:
    """Raise KeyboardInterrupt after so many lines of the package, as a signal may between any two."""
    left = after

    def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        nonlocal left
        if _CODE not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("policy", ["lru", "gati"])
@in_a_thread
def test_an_interrupted_batch_leaves_no_wrong_row(policy: str) -> None:
    random = np.random.default_rng(0)
    weight = table(rows=2_000, width=8)
    reference = bag(weight, "sum")
    cache = EmbeddingCache(MemoryTier(weight), 150, mode="sum", policy=policy)
    for after in range(0, 10_000, 3):
        ids, then, last = (skewed(random, 100, 2_000).view(10, 10) for _ in range(3))
        try:
            with interrupted(after):
                cache(ids)
        except KeyboardInterrupt:
            for more in (then, last):
                assert same_bits(cache(more), reference(more)), after
            continue
        assert after > 50
        return
    raise AssertionError("no batch ended")


@in_a_thread
def test_an_interrupted_change_of_the_pool_leaves_no_wrong_row() -> None:
    random = np.random.default_rng(0)
    weight = table(rows=2_000, width=64)
    reference = bag(weight, "sum")
    for after in range(0, 10_000, 3):
        pool = PagePool(PAGE, 8 * PAGE)
        cache = EmbeddingCache(MemoryTier(weight), mode="sum", pool=pool, policy="lru")
        ids, then, last = (skewed(random, 200, 2_000).view(20, 10) for _ in range(3))
        cache(ids)
        try:
            with interrupted(after):
                pool.resize(3 * PAGE)
        except KeyboardInterrupt:
            for more in (ids, then, last):
                assert same_bits(cache(more), reference(more)), after
            continue
        assert after > 20
        return
    raise AssertionError("no change ended")


@in_a_thread
def test_an_interrupted_batch_keeps_no_other_thread_waiting() -> None:
    """Even while its error is kept, as notebooks do: it may hold what would release a lock."""
    random = np.random.default_rng(0)
    cache = EmbeddingCache(MemoryTier(table(rows=2_000, width=8)), 150, mode="sum", policy="lru")
    for after in range(10_000):
        left = after

        def call(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

        ids = skewed(random, 100, 2_000).view(10, 10)
        before = sys.gettrace()
        sys.settrace(call)
        try:
            cache(ids)
        except KeyboardInterrupt as kept:
            sys.settrace(before)
            returns(partial(cache, ids))
            assert kept.__traceback__ is not None
            continue
        finally:
            sys.settrace(before)
        assert after > 20
        return
    raise AssertionError("no batch ended")
