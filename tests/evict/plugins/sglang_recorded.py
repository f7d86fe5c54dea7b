"""What SGLang 0.5.23 shows a radix cache backend, for one group of pages and without tensors.

Written from sglang/srt/mem_cache/{radix_cache.py, unified_radix_cache.py, unified_cache/unified_tree_core.py,
unified_cache/components/full.py} of the wheel named in recorded.json, which holds the signatures.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class RadixKey:
    """Tokens, in a namespace."""

    def __init__(
        self,
        token_ids: array,
        extra_key: str | None = None,
        is_bigram: bool = False,
        limit: int | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.extra_key = extra_key
        self.is_bigram = is_bigram
        self.cache_salt = cache_salt

    def __len__(self) -> int:
        return len(self.token_ids)

    def raw_token_ids(self) -> array:
        return self.token_ids

    def maybe_to_bigram_view(self, is_eagle: bool, value: Any = None) -> tuple[RadixKey, Any]:
        return self, value

    def page_aligned(self, page_size: int) -> RadixKey:
        return self.cut(0, len(self) // page_size * page_size)

    def cut(self, begin: int, end: int) -> RadixKey:
        return RadixKey(self.token_ids[begin:end], self.extra_key, cache_salt=self.cache_salt)

    def child_key_at(self, offset: int, page_size: int = 1) -> Any:
        return (self.extra_key, tuple(self.token_ids[offset : offset + page_size]))


@dataclass
class MatchPrefixParams:
    key: RadixKey
    req: Any = None


@dataclass
class InsertParams:
    key: RadixKey
    inserted_len: int = 0


@dataclass
class EvictParams:
    num_tokens: int = 0


class UnifiedTreeNode:
    counter = itertools.count()

    def __init__(self, parent: UnifiedTreeNode | None, key: RadixKey | None) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[Any, UnifiedTreeNode] = {}
        self.locks = 0
        self.id = next(self.counter)
        self.last_access_time = float(self.id)

    def __lt__(self, other: UnifiedTreeNode) -> bool:
        return self.last_access_time < other.last_access_time


class UnifiedRadixCache:
    """A radix tree of pages. Whole leaves leave, those of the lowest priority first."""

    def __init__(self, params: Any) -> None:
        self.disable = False
        self.page_size = params.page_size
        self.tree_core = SimpleNamespace(
            is_eagle=False, eviction_strategy=None, node_by_id=lambda node_id: self.arena[node_id]
        )
        self.evicted: list[list[int]] = []  # tokens of the nodes that left
        self.reset()

    def reset(self) -> None:
        self.root = UnifiedTreeNode(None, None)
        self.arena = {self.root.id: self.root}
        self._update()

    def match_prefix(self, params: MatchPrefixParams) -> Any:
        node, tokens = self._walk(params.key)
        return SimpleNamespace(device_prefix_len=tokens, last_device_node=node.id)

    def touch_prefix(self, key: RadixKey) -> None:
        self._walk(key)

    def insert(self, params: InsertParams) -> Any:
        key = params.key.page_aligned(self.page_size)
        node, tokens = self._walk(key)
        if tokens < len(key):
            self._add(node, key.cut(tokens, len(key)))
        self._update()
        return SimpleNamespace(prefix_len=tokens)

    def store(self, key: RadixKey, inserted_len: int = 0) -> None:
        """Publish what a request has computed; as `RadixCache.checkpoint` has it, look that up again."""
        self.insert(InsertParams(key, inserted_len))
        self.match_prefix(MatchPrefixParams(key.page_aligned(self.page_size)))

    def evict(self, params: EvictParams) -> Any:
        priority = self.tree_core.eviction_strategy.get_priority
        heap = [(priority(node), node) for node in self.tree_core.evictable_device_leaves]
        heapq.heapify(heap)
        freed = 0
        while freed < params.num_tokens and heap:
            _, node = heapq.heappop(heap)
            self.evicted.append(list(node.key.token_ids))
            freed += len(node.key)
            del node.parent.children[node.key.child_key_at(0, self.page_size)]
            del self.arena[node.id]
            self._update()
            if node.parent in self.tree_core.evictable_device_leaves:
                heapq.heappush(heap, (priority(node.parent), node.parent))
        return SimpleNamespace(num_tokens_evicted=freed)

    def evict_for_alloc(self, params: EvictParams, *, allocation_reclaim_satisfied: Any = None) -> Any:
        return UnifiedRadixCache.evict(self, params)

    def inc_lock_ref(self, node_id: int, skip_lock_components: Any = ()) -> Any:
        self._lock(node_id, 1)

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        self._lock(node_id, -1)

    def _lock(self, node_id: int, change: int) -> None:
        node: UnifiedTreeNode | None = self.arena[node_id]
        while node is not None:
            node.locks += change
            node = node.parent
        self._update()

    def _walk(self, key: RadixKey) -> tuple[UnifiedTreeNode, int]:
        page, node, at = self.page_size, self.root, 0
        while at < len(key):
            child = node.children.get(key.child_key_at(at, page))
            if child is None:
                break
            child.last_access_time = float(next(UnifiedTreeNode.counter))
            common = 0
            while (
                common < min(len(child.key), len(key) - at)
                and child.key.token_ids[common : common + page]
                == key.token_ids[at + common : at + common + page]
            ):
                common += page
            if common < len(child.key):
                upper = self._add(node, child.key.cut(0, common))
                upper.locks, upper.last_access_time = child.locks, child.last_access_time
                child.key = child.key.cut(common, len(child.key))
                child.parent = upper
                upper.children[child.key.child_key_at(0, page)] = child
                self._update()
                return upper, at + common
            node, at = child, at + common
        return node, at

    def _add(self, parent: UnifiedTreeNode, key: RadixKey) -> UnifiedTreeNode:
        node = UnifiedTreeNode(parent, key)
        parent.children[key.child_key_at(0, self.page_size)] = node
        self.arena[node.id] = node
        return node

    def _update(self) -> None:
        self.tree_core.evictable_device_leaves = {
            node
            for node in self.arena.values()
            if node is not self.root and not node.children and not node.locks
        }

    def held(self) -> set[int]:
        return {token for node in self.arena.values() if node.key for token in node.key.token_ids}
