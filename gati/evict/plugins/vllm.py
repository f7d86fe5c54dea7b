"""vLLM's CPU offload tier: `GatiCachePolicy`, which vLLM loads by the name of this module.

Written for vLLM 0.33.0, where out-of-tree policies are experimental. Give `kv_connector_extra_config`

    {"eviction_policy": "GatiCachePolicy", "cache_policy_module_path": "gati.evict.plugins.vllm"}

and choose policy and predictor with `GATI_EVICT_CONFIG`. For `lpc` and `laru+lpc`, requests pass the
probability that their conversation continues: `"kv_transfer_params": {"gati_continue": 0.9}`; without it, an
average is assumed. vLLM is imported when it requests the class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gati.evict.plugins.interfaces import check_attributes, check_methods, other_version
from gati.evict.plugins.settings import HINT, PluginSettings, plugin_settings

_CALLED = (
    "get",
    "insert",
    "remove",
    "touch",
    "on_store_miss",
    "on_request_access",
    "on_request_finished",
    "evict",
    "clear",
    "mark_evictable",
    "mark_non_evictable",
)
_OF_REQUESTS = ("kv_transfer_params", "_offload_key_positions", "get_state", "set_state")
_GROUP_BYTES = 4  # at the end of a key: which KV cache group it belongs to


@dataclass
class _Groups:
    """Stored in vLLM's context of a request: its groups that were counted, and those still to count."""

    owner: object
    generation: int
    counted: set[bytes] = field(default_factory=set)
    waiting: dict[bytes, None] = field(default_factory=dict)


class VllmEviction:
    """The methods of vLLM's `CachePolicy`, for keys that are bytes and chunks that belong to vLLM.

    A request is counted when it first loads or stores; later stores belong to the same access. Its path is
    recorded by the scheduler in the request's context; keys that are not on it are evicted as by LRU. Every
    KV cache group has its own paths.
    """

    def __init__(
        self,
        cache_capacity: int,
        *,
        settings: PluginSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache_capacity = cache_capacity
        self._settings = settings or plugin_settings()
        self._clock = clock
        self._generation = 0
        self._chunks: dict[bytes, Any] = {}
        self._begin_anew()

    def get(self, key: bytes) -> Any:
        """The chunk of a key, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any) -> None:
        """A chunk was allocated; it must stay until its data have arrived."""
        self._open(req_context, key[-_GROUP_BYTES:])
        self._chunks[key] = chunk
        self._books.stored([key])
        if chunk.ref_cnt != 0:
            self._books.pin(key)

    def remove(self, key: bytes) -> None:
        """A store failed."""
        self._settle()
        del self._chunks[key]
        self._books.forget(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """These keys are used by a request."""
        self._count(list(keys), req_context)

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """A request is about to store these keys."""
        self._count(list(keys), req_context)

    def on_request_access(self, keys: Iterable[bytes], req_context: Any) -> None:
        """A request loads or stores these keys."""
        self._count(list(keys), req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """A request is done. It was counted when it began."""
        self._settle()

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Remove `n` chunks that no transfer uses and that are not `protected`; None if there are fewer.

        vLLM protects the keys that it offers to store, so protected keys that are not cached are incoming.
        """
        if n == 0:
            return []
        incoming = [key for key in self._path if key in protected and key not in self._chunks]
        victims: Any = self._books.victims(n, incoming, protected)
        return None if victims is None else [(key, self._chunks.pop(key)) for key in victims]

    def clear(self) -> None:
        """Forget everything, including what was learned."""
        self._books.close()
        self._begin_anew()

    def mark_evictable(self, key: bytes) -> None:
        """No transfer uses this chunk any more."""
        self._books.unpin(key)

    def mark_non_evictable(self, key: bytes) -> None:
        """A transfer uses this chunk."""
        self._books.pin(key)

    def figures(self) -> dict[str, Any]:
        """Counts of policy, predictor and index."""
        return dict(self._books.figures())

    def _begin_anew(self) -> None:
        self._books = self._settings.books(self.cache_capacity)
        self._chunks.clear()
        self._generation += 1
        self._context: Any = None  # of the current request; `_group` and `_path` are one part of it
        self._group = b""
        self._path: list[bytes] = []
        self._positions = 0  # number of its keys when the path was read

    def _count(self, keys: list[bytes], context: Any) -> None:
        """Count the new groups of a request; one of them stays active for the next stores."""
        if context is not self._context or len(_positions(context)) != self._positions:
            self._settle()
        groups = dict.fromkeys(key[-_GROUP_BYTES:] for key in keys)
        state = self._state(context)
        for group in groups:
            if group not in state.counted:
                state.waiting[group] = None
        if self._context is None and groups:
            self._open(context, next(iter(groups)))

    def _open(self, context: Any, group: bytes) -> None:
        """Continue with one group of a request; count it if it is new."""
        if context is self._context and group == self._group:
            return
        if context is not self._context:
            self._settle()
        state = self._state(context)
        self._context, self._group, self._path = context, group, _path(group, context)
        self._positions = len(_positions(context))
        state.waiting.pop(group, None)
        if group in state.counted:
            self._books.resume(self._path, self._clock())
        else:
            state.counted.add(group)
            self._books.hint((context.kv_transfer_params or {}).get(HINT))
            self._books.begin(self._path, self._clock())

    def _settle(self) -> None:
        """The current request stores no more for now: count its other groups, too."""
        if self._context is not None:
            for group in list(self._state(self._context).waiting):
                self._open(self._context, group)
        self._books.finish()
        self._context, self._group, self._path = None, b"", []

    def _state(self, context: Any) -> _Groups:
        state: _Groups | None = context.get_state(_Groups)
        if state is None or state.owner is not self or state.generation != self._generation:
            state = _Groups(self, self._generation)
            context.set_state(state)
        return state


def _path(group: bytes, context: Any) -> list[bytes]:
    """The keys of a request in one group, from the root down, as the scheduler recorded them.

    If a request ends within a chunk, vLLM may store that part under a separate key. Such keys are between
    those of whole chunks and are not continued, so they are not part of the path.
    """
    positions = _positions(context)
    keys = [key for key in positions if key[-_GROUP_BYTES:] == group]
    keys.sort(key=positions.__getitem__)
    step = positions[keys[0]] if keys else 0
    path: list[bytes] = []
    for key in keys:
        if positions[key] == (len(path) + 1) * step:
            path.append(key)
    return path


def _positions(context: Any) -> dict[bytes, int]:
    """The end of each key of a request, in tokens. vLLM's public method is for single keys only."""
    positions: dict[bytes, int] = context._offload_key_positions
    return positions


@cache
def _policy_class() -> type:
    """The class for vLLM. Raises ImportError without vLLM, EvictError for one with another interface."""
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

    try:
        from vllm.v1.kv_offload.base import ReqContext
    except ImportError as error:
        raise other_version("vllm", str(error)) from error
    check_methods("vllm", VllmEviction, CachePolicy, _CALLED)
    check_attributes("vllm", ReqContext, _OF_REQUESTS)
    return type("GatiCachePolicy", (VllmEviction, CachePolicy), {"__doc__": VllmEviction.__doc__})


def __getattr__(name: str) -> Any:
    if name == "GatiCachePolicy":
        return _policy_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
