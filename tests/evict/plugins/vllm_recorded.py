"""What vLLM 0.33.0 shows a cache policy, and the order in which its CPU tier calls one.

Written from vllm/v1/kv_offload/{base.py, cpu/manager.py, cpu/policies/base.py} of the wheel named in
recorded.json, which holds the signatures; `test_contracts.py` compares both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


class ChunkStatus:
    """One chunk: -1 while it is written, then how many transfers read it."""

    def __init__(self, chunk_id: int) -> None:
        self.ref_cnt = -1
        self.chunk_id = chunk_id

    @property
    def is_ready(self) -> bool:
        return self.ref_cnt >= 0


@dataclass
class ReqContext:
    """What vLLM passes along with every call that concerns a request."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    _state: dict[type, Any] = field(default_factory=dict, repr=False, init=False)
    _offload_key_positions: dict[bytes, int] = field(default_factory=dict, repr=False, init=False)

    def set_state(self, val: Any) -> None:
        self._state[type(val)] = val

    def get_state(self, cls: type) -> Any:
        return self._state.get(cls)

    def set_offload_key_position(self, key: bytes, end_token: int) -> None:
        self._offload_key_positions[key] = end_token

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._offload_key_positions.get(key)


class CachePolicy(ABC):
    """The interface, with the two hooks that have defaults in vLLM."""

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity

    @abstractmethod
    def get(self, key: bytes) -> ChunkStatus | None: ...

    @abstractmethod
    def insert(self, key: bytes, chunk: ChunkStatus, req_context: ReqContext) -> None: ...

    @abstractmethod
    def remove(self, key: bytes) -> None: ...

    @abstractmethod
    def touch(self, keys: Any, req_context: ReqContext) -> None: ...

    def on_store_miss(self, keys: Any, req_context: ReqContext) -> None:
        self.touch(keys, req_context)

    def on_request_access(self, keys: Any, req_context: ReqContext) -> None:
        return

    def on_request_finished(
        self, key_groups: Any, insertion_only_keys: set, reused_keys: set, req_context: ReqContext
    ) -> None:
        for keys in key_groups:
            self.touch(keys, req_context)

    @abstractmethod
    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None: ...

    @abstractmethod
    def clear(self) -> None: ...

    def mark_evictable(self, key: bytes) -> None:
        return

    def mark_non_evictable(self, key: bytes) -> None:
        return


def make_offload_key(block_hash: bytes, group_idx: int) -> bytes:
    """A block's hash and its group in four bytes."""
    return block_hash + group_idx.to_bytes(4, "big")


class CPUOffloadingManager:
    """Calls a policy as vLLM's manager does: counts references, allocates, evicts, inserts."""

    def __init__(self, num_chunks: int, policy: Any) -> None:
        self._num_chunks = num_chunks
        self._policy = policy
        self._held = 0
        self._evictable = 0

    def lookup(self, key: bytes, req_context: ReqContext) -> bool:
        chunk = self._policy.get(key)
        return chunk is not None and chunk.is_ready

    def prepare_load(self, keys: list[bytes], req_context: ReqContext) -> None:
        for key in keys:
            chunk = self._policy.get(key)
            assert chunk is not None and chunk.is_ready
            if chunk.ref_cnt == 0:
                self._policy.mark_non_evictable(key)
                self._evictable -= 1
            chunk.ref_cnt += 1
        self._record(keys, req_context)

    def complete_load(self, keys: list[bytes], req_context: ReqContext) -> None:
        for key in keys:
            chunk = self._policy.get(key)
            chunk.ref_cnt -= 1
            if chunk.ref_cnt == 0:
                self._evictable += 1
                self._policy.mark_evictable(key)

    def prepare_store(
        self, keys: list[bytes], req_context: ReqContext
    ) -> tuple[list[bytes], list[bytes]] | None:
        """Keys to store and keys evicted for them, or None."""
        to_store = [key for key in keys if self._policy.get(key) is None]
        if to_store:
            self._policy.on_store_miss(to_store, req_context)
        self._record(keys, req_context)
        if not to_store:
            return [], []
        count = len(to_store) - (self._num_chunks - self._held)
        evicted: list[bytes] = []
        if count > 0:
            if count > self._evictable:
                return None
            found = self._policy.evict(count, set(keys))
            if found is None:
                return None
            assert len(found) == count
            assert all(chunk.ref_cnt == 0 and key not in keys for key, chunk in found)
            assert all(self._policy.get(key) is None for key, _ in found)
            self._evictable -= count
            self._held -= count
            evicted = [key for key, _ in found]
        for number, key in enumerate(to_store):
            self._policy.insert(key, ChunkStatus(number), req_context)
        self._held += len(to_store)
        return to_store, evicted

    def complete_store(self, keys: list[bytes], req_context: ReqContext, success: bool = True) -> None:
        for key in keys:
            chunk = self._policy.get(key)
            if success:
                chunk.ref_cnt = 0
                self._evictable += 1
                self._policy.mark_evictable(key)
            else:
                self._policy.remove(key)
                self._held -= 1

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._policy.on_request_finished((), set(), set(), req_context)

    def reset_cache(self) -> None:
        self._policy.clear()
        self._held = self._evictable = 0

    def _record(self, keys: list[bytes], req_context: ReqContext) -> None:
        if req_context.get_state(set) is None:
            req_context.set_state(set())
        seen = req_context.get_state(set)
        new = [key for key in keys if key not in seen]
        seen.update(new)
        if new:
            self._policy.on_request_access(new, req_context)
