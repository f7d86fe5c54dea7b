"""`evict.PrefixCache`: decides which prefixes to keep, for your own engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from gati.errors import EvictError
from gati.evict.cache import BlockCache, Handle
from gati.evict.live import LiveCacheSettings
from gati.evict.predict.conversing import HintedContinuation


@dataclass(frozen=True)
class PrefixMatch:
    """An active request: its first `hits` blocks are cached and stay cached until it is released."""

    hits: int
    requested: int
    _handle: Handle = field(repr=False)


class PrefixCache:
    """The index of a prefix cache of `blocks` blocks; the engine stores the blocks themselves.

    An identifier names a block together with all blocks before it, like the chained hashes of vLLM. `match` a
    request, compute its missing blocks, `insert` it, free the blocks that `insert` returns, `release` it:

        match = cache.match(ids)
        for gone in cache.insert(match):
            free(gone)
        cache.release(match)

    `gap_s` is the mean pause before a user's next prompt in seconds, for `lpc` and `laru+lpc`, which use the
    hints passed to `insert`. Several requests may be active, but calls must not run concurrently.

    With `cost_growth` g, a block with n blocks before it takes 1 + g n times as long to compute as a first
    one, because attention reads them all. `gati` then saves time rather than blocks, and its guard counts
    time. Other policies ignore it. docs/eviction.md says how to compute it for a network.

    `service` is the folder of `gati evict serve`: accesses are logged there, and predictors are loaded from
    there instead of being fitted here. Calls take equally long whether the service runs or not; `close` stops
    the threads that log and load. With policies that do not predict reuse, accesses are only logged.

    Raises EvictError for sizes below one, policies and predictors that are unknown or need the future, a
    growth below zero and a seed out of range; if predictions are learned here, also without LightGBM.
    """

    def __init__(
        self,
        blocks: int,
        policy: str = "gati",
        *,
        predictor: str = "reuse",
        gap_s: float = 100.0,
        seed: int = 0,
        cost_growth: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        service: str | Path | None = None,
    ) -> None:
        if blocks < 1:
            raise EvictError(f"blocks is {blocks}; give at least 1")
        settings = LiveCacheSettings(policy, predictor, seed, gap_s, cost_growth, service)
        self._cache = BlockCache(settings.make_policy(blocks))
        self._link = settings.link(self._cache)
        self._clock = clock
        self._now_s = -math.inf

    def __len__(self) -> int:
        """Number of cached blocks."""
        return self._cache.tree.used

    def match(self, ids: Sequence[Hashable]) -> PrefixMatch:
        """Find how many leading blocks of a request are cached, and lock them until it is released.

        Raises TraceError, with nothing changed, if a block occurs twice or follows another one than before.
        """
        # The tree only compares and hashes identifiers, so any hashable value works.
        handle = self._cache.match(cast("list[int]", list(ids)))
        return PrefixMatch(handle.hits, len(ids), handle)

    def insert(self, match: PrefixMatch, hints: Mapping[str, Any] | None = None) -> list[Hashable]:
        """Count a matched request as served: its missing blocks are now cached. Returns the evicted blocks.

        If a request is longer than the cache, its first blocks are cached. `lpc` and `laru+lpc` read from
        `hints` the probability that the conversation continues, as `{"continue": 0.9}`; without it, they
        assume an average conversation. Raises EvictError, with nothing changed, if too many blocks are
        locked, and for a hint that is not a probability; TraceError for blocks as in `match` that were
        evicted since.
        """
        source = self._cache.predictor
        if isinstance(source, HintedContinuation):
            source.hint((hints or {}).get("continue", math.nan))
        self._now_s = max(self._now_s, self._clock())  # a clock may be set back
        return cast("list[Hashable]", self._cache.insert(match._handle, self._now_s))

    def release(self, match: PrefixMatch) -> None:
        """Unlock the blocks of this request, so that they can be evicted. Repeated calls do nothing."""
        self._cache.release(match._handle)

    def figures(self) -> dict[str, Any]:
        """Counts of the policy and of the predictor."""
        linked = {} if self._link is None else self._link.figures()
        return {**self._cache.figures(), **linked}

    def close(self) -> None:
        """Stop logging and loading versions; writes pending log entries for two seconds at most."""
        if self._link is not None:
            self._link.close()
