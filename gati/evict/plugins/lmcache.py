"""LMCache's CPU cache: the cache policy `GATI`, to be registered before LMCache starts.

Recorded from LMCache 0.5.6. `register` adds the policy to LMCache's own table; Gati's package does that by
itself in every process of vLLM, so that with LMCache's setting `cache_policy: "GATI"` all is said.

LMCache tells a policy which chunks were hit and which were put, but not which chunk follows which, nor what
it needs room for. So each chunk stands on its own here, as it does in LMCache's LRU, and a prediction that
was wrong is not caught when its chunk returns: what bounds the misses is the guard.
Layer-wise caching (`use_layerwise`) works on its own keys for every layer and gains nothing here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, MutableMapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from gati.errors import EvictError
from gati.evict.plugins.books import EngineBooks
from gati.evict.plugins.settings import PluginSettings, plugin_settings
from gati.evict.policy.registry import policy_named

NAME = "GATI"
_REMEMBERED = 100_000  # batches from before the capacity was known
_ANY = 2**62


class LmcacheEviction:
    """The methods of LMCache's `BaseCachePolicy`.

    Chunks hit and those put next are one access. LMCache reports hits from the last chunk to the first, puts
    from the first on, and no ends of requests: one has ended where the next hit is not above the one before,
    or room is needed after puts. LMCache holds its lock while it calls.
    """

    def __init__(
        self, *, settings: PluginSettings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings or plugin_settings()
        if policy_named(self._settings.policy, flat=False).tree_only:
            raise EvictError(
                f"policy {self._settings.policy} needs to know which chunk follows which, which LMCache does "
                "not report: choose another, such as gati"
            )
        self._clock = clock
        self._books: EngineBooks | None = None  # until the capacity is known
        self._before: deque[tuple[list[Hashable], float]] = deque(maxlen=_REMEMBERED)
        self._hits: dict[Hashable, None] = {}
        self._puts: dict[Hashable, None] = {}
        self._offered: list[Hashable] = []
        self._depth: dict[Hashable, int] = {}  # of chunks that are held: their places in what put them
        self._above = _ANY  # the next hit of the same request lies above this depth
        if self._settings.blocks is not None:
            self._books = self._settings.books(self._settings.blocks, flat=True)

    def init_mutable_mapping(self) -> MutableMapping[Any, Any]:
        """The mapping in which LMCache keeps its chunks."""
        return {}

    def update_on_hit(self, key: Hashable, cache_dict: MutableMapping[Any, Any]) -> None:
        """A chunk was looked up and found."""
        depth = self._depth.get(key, -1)
        if self._puts or key in self._hits or depth >= self._above:
            self._count()
        self._hits[key] = None
        self._above = depth if depth >= 0 else self._above
        if self._books is not None:
            self._books.pin(key)  # counted with what is put next, which there must be room for first

    def update_on_put(self, key: Hashable) -> None:
        """A chunk was stored."""
        if key in self._puts:
            self._count()
        self._puts[key] = None

    def update_on_force_evict(self, key: Hashable) -> None:
        """A chunk was removed by somebody else."""
        self._count()
        if key in self._offered:
            self._offered.remove(key)
        self._depth.pop(key, None)
        if self._books is None:
            self._before = deque(
                (([each for each in ids if each != key], now_s) for ids, now_s in self._before),
                maxlen=_REMEMBERED,
            )
        else:
            self._books.forget(key)

    def get_evict_candidates(
        self, cache_dict: MutableMapping[Any, Any], num_candidates: int = 1
    ) -> list[Hashable]:
        """Up to `num_candidates` chunks that can be evicted, best first; LMCache evicts all of them."""
        if self._puts:
            self._count()
        books = self._started(len(cache_dict))
        self._take_back(books, cache_dict)
        found: list[Hashable] = []
        while len(found) < num_candidates and (victims := books.victims(1)) is not None:
            (key,) = victims
            if key not in cache_dict:
                continue
            self._depth.pop(key, None)
            self._offered.append(key)  # what LMCache keeps for all that is taken back next time
            if cache_dict[key].can_evict:
                found.append(key)
        if not found:  # chunks that were never announced
            free = (key for key, chunk in cache_dict.items() if chunk.can_evict and key not in self._offered)
            found = [key for key, _ in zip(free, range(num_candidates), strict=False)]
        return found

    def figures(self) -> dict[str, Any]:
        """Counts of policy, predictor and books; none before LMCache needed room."""
        return {} if self._books is None else dict(self._books.figures())

    def _count(self) -> None:
        """What was hit, and put next, is one access."""
        ids = [*reversed(self._hits), *(key for key in self._puts if key not in self._hits)]
        if self._books is not None:
            for key in self._hits:
                self._books.unpin(key)
        for place, key in enumerate(ids):
            if key in self._puts:
                self._depth[key] = place
        self._hits.clear()
        self._puts.clear()
        self._above = _ANY
        if not ids:
            return
        if self._books is None:
            self._before.append((ids, self._clock()))
        else:
            _access(self._books, ids, self._clock())

    def _started(self, capacity: int) -> EngineBooks:
        """The books; LMCache knows its capacity in bytes only, so it is what is held when room is needed."""
        if self._books is None:
            self._books = self._settings.books(max(capacity, 1), flat=True)
            for ids, now_s in self._before:
                _access(self._books, ids, now_s)
            self._before.clear()
            for key in self._hits:
                self._books.pin(key)
        return self._books

    def _take_back(self, books: EngineBooks, cache_dict: MutableMapping[Any, Any]) -> None:
        """Chunks that were to leave but are still there."""
        kept = [key for key in self._offered if key in cache_dict and key not in books]
        self._offered.clear()
        if kept:
            _access(books, kept, self._clock())


def _access(books: EngineBooks, ids: list[Hashable], time_s: float) -> None:
    """These chunks are held and were used just now."""
    for begin in range(0, len(ids), books.capacity):
        part = ids[begin : begin + books.capacity]
        books.begin(part, time_s)
        books.stored(part)
        books.finish()


@cache
def _policy_class() -> type:
    from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy

    return type("GatiCachePolicy", (LmcacheEviction, BaseCachePolicy), {"__doc__": LmcacheEviction.__doc__})


def register() -> None:
    """Add `GATI` to LMCache's policies. Does nothing where LMCache is not installed."""
    if find_spec("lmcache") is None:
        return
    from lmcache.v1.storage_backend.cache_policy import POLICY_MAPPING

    POLICY_MAPPING[NAME] = _policy_class()
