"""`evict.PrefixCache`: which prefixes to keep, for an engine of your own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from gati.errors import EvictError
from gati.evict.cache import Handle
from gati.evict.learn.following import LearningLink, following
from gati.evict.policy.registry import POLICIES
from gati.evict.predict.conversing import HintedContinuation, hinted
from gati.evict.predict.named import predictor_named
from gati.evict.replays.replay import build


@dataclass(frozen=True)
class PrefixMatch:
    """A request under way: its first `hits` blocks are cached and stay so until it is released."""

    hits: int
    requested: int
    _handle: Handle = field(repr=False)


class PrefixCache:
    """Keeps the books of a prefix cache of `blocks` blocks; the blocks themselves stay with the engine.

    An identifier stands for a block and all that comes before it, as the chained hashes of vLLM do. `match` a
    request, compute what is missing, `insert` it, free what that returns, `release` the request:

        match = cache.match(ids)
        for gone in cache.insert(match):
            free(gone)
        cache.release(match)

    `gap_s` is the mean pause of users, for `lpc` and `laru+lpc`, which ask `insert` for hints. Several
    requests may be under way; calls must not overlap in time.

    `service` is the folder of `gati evict serve`: accesses are logged there, and predictors come from there
    instead of being fitted here. Whether the service runs makes no difference to what a call takes; `close`
    ends the threads that log and follow. Policies that predict no reuse only log. Raises EvictError for sizes
    below one and for unknown policies and predictors.
    """

    def __init__(
        self,
        blocks: int,
        policy: str = "gati",
        *,
        predictor: str = "reuse",
        gap_s: float = 100.0,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        service: str | Path | None = None,
    ) -> None:
        if blocks < 1:
            raise EvictError(f"blocks is {blocks}; give at least 1")
        if policy == "lpc-oracle":
            raise EvictError("lpc-oracle needs a whole trace in advance; use lpc")
        converses = policy in POLICIES and POLICIES[policy].converses
        if service is not None and predictor != "reuse":
            raise EvictError(f"give either predictor ({predictor!r}) or service, not both")
        named = following if service is not None else predictor_named(predictor)
        maker = hinted(gap_s) if converses else named
        self._cache = build(policy, blocks, maker, seed=seed)
        self._link = None if service is None else LearningLink(self._cache, service)
        self._clock = clock

    def __len__(self) -> int:
        """Number of cached blocks."""
        return self._cache.tree.used

    def match(self, ids: Sequence[Hashable]) -> PrefixMatch:
        """Find how many leading blocks of a request are cached, and lock these until it is released."""
        # The tree only compares identifiers and looks them up, so that whatever has a hash may be one.
        handle = self._cache.match(cast("list[int]", list(ids)))
        return PrefixMatch(handle.hits, len(ids), handle)

    def insert(self, match: PrefixMatch, hints: Mapping[str, Any] | None = None) -> list[Hashable]:
        """Count a matched request as served: its missing blocks are cached now, and those returned are not.

        Of a request longer than the cache the first blocks are cached. `lpc` and `laru+lpc` take from `hints`
        how probable it is that the conversation goes on, as `{"continue": 0.9}`; where that is missing, it
        counts as an average one. Raises EvictError, with nothing changed, where too much is locked, and for
        a hint that is no probability.
        """
        source = self._cache.predictor
        if isinstance(source, HintedContinuation):
            source.hint((hints or {}).get("continue", math.nan))
        return cast("list[Hashable]", self._cache.insert(match._handle, self._clock()))

    def release(self, match: PrefixMatch) -> None:
        """The blocks of this request may leave when others need the room. Once is enough."""
        self._cache.release(match._handle)

    def figures(self) -> dict[str, Any]:
        """Counts of the policy and of the predictor."""
        counts = dict(self._cache.policy.figures())
        counts |= self._cache.predictor.figures() if self._cache.predictor is not None else {}
        return counts if self._link is None else counts | self._link.figures()

    def close(self) -> None:
        """Log and follow no longer; what waits to be logged is written, for two seconds at most."""
        if self._link is not None:
            self._link.close()
