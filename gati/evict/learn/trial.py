"""A trial of a fitted predictor before it is published: the guard's rule, with the active version for LRU.

Two caches without contents see the same requests, all of which came after the fit: one follows the candidate,
the other the active version, or is LRU where there is none. X counts by how many blocks the candidate's has
missed more. As the guard of `gati` has it, the trial is lost once X >= eps n + B. It is won where X < 0 after
so many requested blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gati.evict.cache import BlockCache
from gati.evict.policy.guard import EXCESS_SHARE, slack
from gati.evict.predict.hazard import HazardModel
from gati.evict.predict.reuse import Reuse
from gati.evict.replays.replay import build

Verdict = Literal["won", "lost"]


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """How a trial ended, by n and X, against which version (0: LRU)."""

    verdict: Verdict
    requested: int
    excess: int
    against: int


class VersionTrial:
    """Tries `candidate` against `active` (None: LRU) for `length_capacities` capacities of each cache.

    Blocks count from when a cache is full. Each engine has caches of its own.
    """

    def __init__(
        self, candidate: HazardModel, active: HazardModel | None, *, length_capacities: float, seed: int = 0
    ) -> None:
        self.candidate = candidate
        self._active = active
        self._length_capacities = length_capacities
        self._seed = seed
        self._caches: dict[str, tuple[BlockCache, BlockCache]] = {}
        self.requested = 0  # n
        self.excess = 0  # X

    def take(self, engine: str, capacity_blocks: int, ids: Sequence[int], time_s: float) -> None:
        """A request came. Raises TraceError where its blocks are no path of this engine's tree."""
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

    @property
    def verdict(self) -> Verdict | None:
        """How it ended, None while it goes on."""
        capacities = [cache.capacity for cache, _ in self._caches.values()]
        if not capacities:
            return None
        if self.excess >= EXCESS_SHARE * self.requested + sum(map(slack, capacities)):
            return "lost"
        if self.requested < self._length_capacities * sum(capacities):
            return None
        return "won" if self.excess < 0 else "lost"

    def _cache(self, model: HazardModel | None, capacity: int) -> BlockCache:
        if model is None:
            return build("lru", capacity, None)
        return build("gati", capacity, lambda blocks, seed: Reuse(blocks, model=model, fits=False, seed=seed))
