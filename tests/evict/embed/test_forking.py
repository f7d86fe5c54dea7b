"""Children that are forked while threads of their parent serve."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gati.evict.embed.cache import EmbeddingCache
from gati.evict.embed.tiers import MemoryTier
from tests.evict.embed.test_cache import bag, same_bits, skewed, table
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch's further threads are not in a child, either."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def forked(cache: EmbeddingCache, ids: torch.Tensor, expected: torch.Tensor) -> int:
    """The process id of a child, which ends with status 0 if it is served right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of the threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if same_bits(cache(ids), expected) and same_bits(cache(ids), expected) else 2
        finally:
            os._exit(status)
    return child


@pytest.mark.parametrize("policy", ["lru", "gati"])
def test_a_child_is_served_whatever_threads_of_its_parent_do(policy: str, one_thread: None) -> None:
    random = np.random.default_rng(0)
    weight = table(rows=2_000, width=8)
    reference = bag(weight, "sum")
    cache = EmbeddingCache(MemoryTier(weight), 150, mode="sum", policy=policy)
    ended = threading.Event()

    def serve(seed: int) -> None:
        own = np.random.default_rng(seed)
        while not ended.is_set():
            cache(skewed(own, 100, 2_000).view(10, 10))

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    statuses: list[int] = []
    try:
        for _ in range(10):
            ids = skewed(random, 100, 2_000).view(10, 10)
            child = forked(cache, ids, reference(ids))

            def has_ended(child: int = child) -> bool:
                found, status = os.waitpid(child, os.WNOHANG)
                statuses.extend([os.waitstatus_to_exitcode(status)] * (found == child))
                return found == child

            try:
                until(has_ended, timeout_s=60.0)
            except AssertionError:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert statuses == [0] * 10
