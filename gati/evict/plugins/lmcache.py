"""LMCache's CPU cache: the cache policy `GATI`, to be registered before LMCache starts.

Written for LMCache 0.5.6. `register` adds the policy to LMCache's table; Gati does this automatically in
every process of vLLM, so only LMCache's setting `cache_policy: "GATI"` is needed.

LMCache reports which chunks were hit and which were put, but not which chunk follows which, nor for what it
needs room. So chunks are independent here, as in LMCache's LRU, and a wrong prediction is not caught when its
chunk returns: only the guard bounds the misses. Layer-wise caching (`use_layerwise`) has separate keys for
every layer, and gains nothing here.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, MutableMapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from gati.errors import EvictError
from gati.evict.plugins.books import EngineBooks
from gati.evict.plugins.interfaces import WRITTEN_FOR, check_methods
from gati.evict.plugins.settings import PluginSettings, plugin_settings
from gati.evict.policy.registry import policy_named

_log = logging.getLogger("gati.evict")

NAME = "GATI"
_CALLED = (
    "init_mutable_mapping",
    "update_on_hit",
    "update_on_put",
    "update_on_force_evict",
    "get_evict_candidates",
)
_REMEMBERED = 100_000  # batches from before the capacity was known
_ANY = 2**62


class LmcacheEviction:
    """The methods of LMCache's `BaseCachePolicy`.

    Hits and the following puts are one access. LMCache reports hits from the last chunk to the first, puts
    from the first on, but no ends of requests: a request has ended if the next hit is not above the previous
    one, or if room is needed after puts. As long as no room is needed, puts of several requests look like one
    request, so each is an access of its own: such chunks are evicted in the order of their puts, as LMCache's
    LRU does. LMCache holds its lock during calls.

    Raises EvictError for settings that cannot work, even if only the first eviction would show that.
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
        if self._settings.cost_growth:
            raise EvictError(
                "cost_growth needs to know which chunk follows which, which LMCache does not report: "
                "leave it out"
            )
        if self._settings.service is not None:
            raise EvictError(
                "a service needs to know which chunk follows which, which LMCache does not report: leave out "
                "service, and predictions are learned in LMCache's own process"
            )
        self._clock = clock
        self._books: EngineBooks | None = None  # until the capacity is known
        self._before: deque[tuple[list[Hashable], float]] = deque(maxlen=_REMEMBERED)
        self._batches = 0  # that were ever in `_before`
        self._removed: OrderedDict[Hashable, int] = OrderedDict()  # their number when a chunk was removed
        self._hits: dict[Hashable, None] = {}
        self._puts: dict[Hashable, None] = {}
        self._made_room = False  # since an access was last counted
        self._offered: dict[Hashable, int] = {}  # victims of the last choice, with their depths
        self._in_use: set[Hashable] = set()  # victims that LMCache could not evict
        self._cached: MutableMapping[Any, Any] = {}  # LMCache's mapping
        self._depth: dict[Hashable, int] = {}  # of held chunks: position in the request that put them
        self._above = _ANY  # the next hit of the same request lies above this depth
        self._base = 0  # depth of the first chunk of the next access
        # made even if the capacity is not known: what it raises must not come at the first eviction
        books = self._settings.books(self._settings.blocks or 1, flat=True)
        if self._settings.blocks is not None:
            self._books = books

    def init_mutable_mapping(self) -> MutableMapping[Any, Any]:
        """The mapping in which LMCache stores its chunks."""
        return {}

    def update_on_hit(self, key: Hashable, cache_dict: MutableMapping[Any, Any]) -> None:
        """A chunk was looked up and found."""
        depth = self._depth.get(key, -1)
        if self._puts or key in self._hits or depth >= self._above:
            self._count()
        self._hits[key] = None
        self._above = depth if depth >= 0 else self._above
        if self._books is not None:
            self._books.pin(key)  # counted with the next puts, for which room must be made first

    def update_on_put(self, key: Hashable) -> None:
        """A chunk was stored."""
        self._offered.pop(key, None)  # it was evicted, and is back
        if key in self._puts:
            self._count()
        elif not self._made_room:
            self._count(goes_on=True)
        self._puts[key] = None

    def update_on_force_evict(self, key: Hashable) -> None:
        """A chunk was removed, but not by this policy."""
        self._offered.pop(key, None)
        self._in_use.discard(key)
        self._count()
        self._depth.pop(key, None)
        if self._books is None:
            self._removed[key] = self._batches
            self._removed.move_to_end(key)
            oldest = self._batches - len(self._before)
            while self._removed and next(iter(self._removed.values())) <= oldest:
                self._removed.popitem(last=False)  # of no batch that is remembered
        else:
            self._books.forget(key)

    def get_evict_candidates(
        self, cache_dict: MutableMapping[Any, Any], num_candidates: int = 1
    ) -> list[Hashable]:
        """Up to `num_candidates` chunks that can be evicted, best first; LMCache evicts all of them."""
        if self._puts:
            self._count()
        books = self._started(len(cache_dict))
        self._take_back()
        self._cached, self._made_room = cache_dict, True
        for key in [each for each in self._in_use if each not in cache_dict or cache_dict[each].can_evict]:
            self._in_use.discard(key)
            books.unpin(key)
        found: list[Hashable] = []
        while len(found) < num_candidates and (victims := books.victims(1)) is not None:
            (key,) = victims
            depth = self._depth.pop(key, -1)
            if key not in cache_dict:
                continue
            self._offered[key] = depth  # taken back if LMCache keeps it
            if cache_dict[key].can_evict:
                found.append(key)
        if not found:  # chunks that were never reported
            free = (key for key, chunk in cache_dict.items() if chunk.can_evict)
            found = [key for key, _ in zip(free, range(num_candidates), strict=False)]
        return found

    def figures(self) -> dict[str, Any]:
        """Counts of policy, predictor and index; empty before LMCache first needs room."""
        return {} if self._books is None else dict(self._books.figures())

    def _count(self, *, goes_on: bool = False) -> None:
        """Count the hits and the following puts as one access; the request `goes_on` with the next one."""
        self._take_back()
        ids = [*reversed(self._hits), *(key for key in self._puts if key not in self._hits)]
        if self._books is not None:
            for key in self._hits:
                self._books.unpin(key)
        for place, key in enumerate(ids, self._base):
            if key in self._puts:
                self._depth[key] = place
        self._hits.clear()
        self._puts.clear()
        self._made_room = False
        self._above = _ANY
        self._base = self._base + len(ids) if goes_on else 0
        if not ids:
            return
        if self._books is None:
            self._before.append((ids, self._clock()))
            self._batches += 1
        else:
            _access(self._books, ids, self._clock())

    def _started(self, capacity: int) -> EngineBooks:
        """The index. LMCache knows its capacity only in bytes, so it is the number of chunks held now."""
        if self._books is None:
            self._books = self._settings.books(max(capacity, 1), flat=True)
            for number, (ids, now_s) in enumerate(self._before, self._batches - len(self._before)):
                _access(self._books, [key for key in ids if self._removed.get(key, 0) <= number], now_s)
            self._before.clear()
            self._removed.clear()
            for key in self._hits:
                self._books.pin(key)
        return self._books

    def _take_back(self) -> None:
        """Take back victims that LMCache did not evict."""
        kept = {key: depth for key, depth in self._offered.items() if key in self._cached}
        self._offered.clear()
        if kept and self._books is not None:
            self._books.take_back(kept)
            self._depth |= kept
            for key in kept:
                if not self._cached[key].can_evict:  # or it would be chosen again each time
                    self._in_use.add(key)
                    self._books.pin(key)


def _access(books: EngineBooks, ids: list[Hashable], time_s: float) -> None:
    """Record that these chunks are held and were just used."""
    for begin in range(0, len(ids), books.capacity):
        part = ids[begin : begin + books.capacity]
        books.begin(part, time_s)
        books.stored(part)
        books.finish()


@cache
def _policy_class() -> type:
    from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy

    def checked(kind: type, **options: Any) -> Any:  # not before: LMCache may be there for its other policies
        check_methods("lmcache", LmcacheEviction, BaseCachePolicy, _CALLED)
        return object.__new__(kind)

    members = {"__doc__": LmcacheEviction.__doc__, "__new__": checked}
    return type("GatiCachePolicy", (LmcacheEviction, BaseCachePolicy), members)


def register() -> None:
    """Add `GATI` to LMCache's policies. Does nothing if LMCache is not installed.

    Raises nothing: vLLM, which calls this at every start, would end. Without `GATI`, LMCache says that there
    is no such policy, and a warning says why.
    """
    try:
        if find_spec("lmcache") is None:
            return
        from lmcache.v1.storage_backend.cache_policy import POLICY_MAPPING

        POLICY_MAPPING[NAME] = _policy_class()
    except Exception as error:  # of whatever LMCache imports
        _log.warning(
            "LMCache has no policy %s, which was written for version %s: %s",
            NAME,
            WRITTEN_FOR["lmcache"],
            error,
        )
