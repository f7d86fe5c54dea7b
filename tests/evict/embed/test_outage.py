"""While the slow tier fails, nothing changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gati.errors import EvictError
from gati.evict.embed.cache import EmbeddingCache
from gati.evict.embed.learned import GuardedRows
from gati.evict.embed.policies import ROW_POLICIES
from gati.evict.embed.tiers import Ids, MemoryTier
from tests.evict.embed.test_cache import Asked, skewed, table


@pytest.mark.parametrize("policy", ROW_POLICIES)
def test_an_outage_changes_neither_the_cache_nor_the_guard(policy: str) -> None:
    """After it, the cache is as one that never heard of the requests, but for when rows return."""
    random = np.random.default_rng(0)
    weight = table(rows=2_000)
    slow = Asked(weight)
    cache = EmbeddingCache(slow, 300, mode="sum", policy=policy)

    def fails() -> None:
        raise EvictError("away")

    def contents() -> dict[str, Any]:
        sets = cache._sets
        state = {"ids": sets.ids, "recency": sets.recency, "used": sets.used}
        for name, value in vars(cache._policy).items():
            state |= {name: value} if isinstance(value, np.ndarray) else {}
        if isinstance(cache._policy, GuardedRows):
            state |= vars(cache._policy._guard.shadow)
        return {name: value.copy() for name, value in state.items()}

    for _ in range(60):
        cache(skewed(random, 400, 2_000).view(20, 20))
    for _ in range(30):
        before, figures = contents(), cache.figures()
        slow.meanwhile = fails
        with pytest.raises(EvictError, match="away"):
            cache(skewed(random, 400, 2_000).view(20, 20))
        for name, value in contents().items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)
        assert {**cache.figures(), "refits": None} == {**figures, "refits": None}


class Arriving:
    """Rows that never arrive from a tier that is away; Ctrl-C is pressed while the policy decides."""

    waited = 0

    def receive(self) -> None:
        raise KeyboardInterrupt

    def __call__(self) -> None:
        self.waited += 1
        raise EvictError("away")


def test_ctrl_c_ends_a_batch_although_the_tier_fails_too() -> None:
    arriving = Arriving()

    class Away(MemoryTier):
        def ask(self, ids: Ids, out: torch.Tensor) -> Arriving:
            return arriving

    cache = EmbeddingCache(Away(table()), 100)
    with pytest.raises(KeyboardInterrupt):
        cache(torch.arange(20).view(4, 5))
    assert arriving.waited == 1  # the tier may write to rows until it is waited for
