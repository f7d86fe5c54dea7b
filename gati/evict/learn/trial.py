"""A trial of a fitted predictor before it is published, by the guard's rule against the active version.

Two caches without contents see the same requests, which all came after the fit. One follows the candidate,
the other the active version, or LRU if there is none. X is the number of blocks that the candidate missed
beyond the other. As in the guard of `gati`, the trial is lost once X >= eps n + B. It is won if X < 0 at
the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gati.evict.cache import BlockCache
from gati.evict.policy.guard import EXCESS_SHARE, slack
from gati.evict.policy.registry import make_policy
from gati.evict.predict.hazard import HazardModel
from gati.evict.predict.reuse import Reuse

Verdict = Literal["won", "lost"]

_GONE_S = 600.0  # without a request, after which a trial does not wait for an engine


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """The result of a trial with n and X, and the version it was `against` (0: LRU)."""

    verdict: Verdict
    requested: int
    excess: int
    against: int


class VersionTrial:
    """Tries `candidate` against `active` (None: LRU) for `length_capacities` times the caches' capacity.

    Blocks count once a cache is full. Each engine has its own pair of caches. The capacities of several
    engines add up: in the limit, those of all whose blocks were counted, and in the length, those of them
    that still make requests, since engines that are gone would never bring the trial to its end.
    """

    def __init__(
        self, candidate: HazardModel, active: HazardModel | None, *, length_capacities: float
    ) -> None:
        self.candidate = candidate
        self._active = active
        self._length_capacities = length_capacities
        self._caches: dict[str, tuple[BlockCache, BlockCache]] = {}
        self._counted: dict[str, int] = {}  # capacities of the engines whose blocks were counted
        self._last_s: dict[str, float] = {}  # of their latest requests, by their own clocks
        self.requested = 0  # n
        self.excess = 0  # X

    def take(self, engine: str, capacity_blocks: int, ids: Sequence[int], time_s: float) -> None:
        """Process a request. Raises TraceError if its blocks do not fit this engine's tree."""
        if engine not in self._caches:
            made = (self._cache(self.candidate, capacity_blocks), self._cache(self._active, capacity_blocks))
            self._caches[engine] = made
        tried, rival = self._caches[engine]
        full = tried.tree.used + len(ids) > tried.capacity
        blocks = list(ids)
        hits = rival.access(blocks, time_s).hits
        own = tried.access(blocks, time_s).hits
        if full:
            self.requested += len(ids)
            self.excess += hits - own
            self._counted[engine] = tried.capacity
            self._last_s[engine] = time_s

    def forget(self, engine: str) -> None:
        """Drop the caches of an engine; its blocks remain counted, but the trial does not wait for it."""
        self._caches.pop(engine, None)
        self._last_s.pop(engine, None)

    @property
    def verdict(self) -> Verdict | None:
        """The result, None while the trial runs."""
        if not self._counted:
            return None
        if self.excess >= EXCESS_SHARE * self.requested + sum(map(slack, self._counted.values())):
            return "lost"
        since_s = max(self._last_s.values(), default=0.0) - _GONE_S
        awaited = sum(self._counted[engine] for engine, last_s in self._last_s.items() if last_s >= since_s)
        if not awaited or self.requested < self._length_capacities * awaited:
            return None
        return "won" if self.excess < 0 else "lost"

    def _cache(self, model: HazardModel | None, capacity: int) -> BlockCache:
        if model is None:
            return BlockCache(make_policy("lru", capacity))
        return BlockCache(make_policy("gati", capacity, partial(_predicting, model)))


def _predicting(model: HazardModel, capacity: int, seed: int) -> Reuse:
    return Reuse(capacity, model=model, fits=False, seed=seed)
