"""What LMCache 0.5.6 asks of a cache policy, and the order in which its CPU backend calls one.

Written from lmcache/v1/storage_backend/{local_cpu_backend.py, cache_policy/base_policy.py} and
lmcache/v1/cache_engine.py of the wheel named in recorded.json, which holds the signatures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class BaseCachePolicy(ABC):
    """The interface."""

    @abstractmethod
    def init_mutable_mapping(self) -> Any: ...

    @abstractmethod
    def update_on_hit(self, key: Any, cache_dict: Any) -> None: ...

    @abstractmethod
    def update_on_put(self, key: Any) -> None: ...

    @abstractmethod
    def update_on_force_evict(self, key: Any) -> None: ...

    @abstractmethod
    def get_evict_candidates(self, cache_dict: Any, num_candidates: int = 1) -> list[Any]: ...


class MemoryObj:
    """A chunk's data; pinned ones and those that are read cannot be evicted."""

    def __init__(self) -> None:
        self.pins = 0

    @property
    def can_evict(self) -> bool:
        return self.pins == 0


class LocalCPUBackend:
    """A cache of so many chunks: look up, make room one by one, store."""

    def __init__(self, chunks: int, policy: Any) -> None:
        self.chunks = chunks
        self.cache_policy = policy
        self.hot_cache = policy.init_mutable_mapping()
        self.keys_in_request: list[Any] = []
        self._allocated = 0

    def contains(self, key: Any, pin: bool = False) -> bool:
        if key not in self.hot_cache:
            return False
        if pin:
            self.hot_cache[key].pins += 1
            self.keys_in_request.append(key)
        return True

    def touch_cache(self) -> None:
        for key in reversed(self.keys_in_request):
            self.cache_policy.update_on_hit(key, self.hot_cache)
        self.keys_in_request = []

    def unpin(self, key: Any) -> None:
        self.hot_cache[key].pins -= 1

    def allocate(self, evicted: list[Any]) -> MemoryObj | None:
        while self._allocated == self.chunks:
            keys = self.cache_policy.get_evict_candidates(self.hot_cache, num_candidates=1)
            if not keys:
                return None
            for key in keys:
                assert self.hot_cache.pop(key).can_evict
                self._allocated -= 1
            evicted += keys
        self._allocated += 1
        return MemoryObj()

    def submit_put_task(self, key: Any, memory_obj: MemoryObj) -> None:
        if key in self.hot_cache:
            self._allocated -= 1
            return
        self.hot_cache[key] = memory_obj
        self.cache_policy.update_on_put(key)

    def remove(self, key: Any, force: bool = True) -> None:
        del self.hot_cache[key]
        self._allocated -= 1
        if force:
            self.cache_policy.update_on_force_evict(key)

    def serve(self, path: list[Any]) -> list[Any]:
        """A request as the cache engine has it: look up and touch, then store; what was evicted."""
        hits = next((place for place, key in enumerate(path) if not self.contains(key, pin=True)), len(path))
        self.touch_cache()
        for key in path[:hits]:  # retrieved
            self.unpin(key)
        evicted: list[Any] = []
        stored = []
        for key in path[hits:]:
            data = self.allocate(evicted)
            if data is None:
                break
            stored.append((key, data))
        for key, data in stored:
            self.submit_put_task(key, data)
        return evicted
