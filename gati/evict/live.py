"""Caches that serve now: their settings, whoever gives them, and what such a cache cannot have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gati.errors import EvictError
from gati.evict.cache import BlockCache
from gati.evict.learn.following import LearningLink, following
from gati.evict.policy.base import EvictionPolicy
from gati.evict.policy.registry import make_policy, policy_named
from gati.evict.policy.weighed import PathCosts
from gati.evict.predict.conversing import hinted
from gati.evict.predict.named import Maker, predictor_named
from gati.evict.seeds import check_seed


@dataclass(frozen=True)
class LiveCacheSettings:
    """Policy, predictor and seed of a cache. The others are as in `PrefixCache`."""

    policy: str = "gati"
    predictor: str = "reuse"
    seed: int = 0
    gap_s: float = 100.0
    cost_growth: float = 0.0
    service: str | Path | None = None

    def maker(self, *, flat: bool = False) -> Maker:
        """What makes the predictors. Raises EvictError for settings that cannot work."""
        policy = policy_named(self.policy, flat=flat)
        if policy.foresees:
            instead = "lpc" if policy.converses else "gati"
            raise EvictError(f"{policy.name} needs a whole trace in advance; use {instead}")
        if self.service is not None and self.predictor != "reuse":
            raise EvictError(f"give either a predictor ({self.predictor}) or a service, not both")
        check_seed(self.seed)
        PathCosts(self.cost_growth)
        conversing: Maker = hinted(self.gap_s)
        named: Maker = following
        if self.service is None:
            named = predictor_named(self.predictor, flat=flat, apart=True)
        return conversing if policy.converses else named

    def make_policy(self, capacity: int, *, flat: bool = False) -> EvictionPolicy:
        """The policy of a cache of `capacity` blocks, in a prefix tree or independent.

        Raises EvictError as `maker`.
        """
        maker = self.maker(flat=flat)
        return make_policy(
            self.policy, capacity, maker, flat=flat, seed=self.seed, cost_growth=self.cost_growth
        )

    def link(self, cache: BlockCache) -> LearningLink | None:
        """Connect the cache with the service, if there is one. Raises EvictError as `LearningLink`."""
        return None if self.service is None else LearningLink(cache, self.service)
