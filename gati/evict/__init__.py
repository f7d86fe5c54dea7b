"""Learned eviction for full caches.

from gati import evict

trace = evict.read_trace("trace.jsonl.gz")
result = evict.replay(trace, sizes=[2000], policies=["lru", "gati", "opt"])

cache = evict.PrefixCache(blocks=2000, policy="gati")  # in your own engine
rows = evict.EmbeddingCache(evict.FileTier("table.rows", width=128), rows=10_000)  # for an nn.EmbeddingBag
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gati.evict.policy.guard import bound
from gati.evict.policy.registry import LIMIT, POLICIES
from gati.evict.prefix import PrefixCache, PrefixMatch
from gati.evict.replays.replay import replay
from gati.evict.replays.result import PolicyOutcome, TraceReplay
from gati.evict.trace.read import read_trace
from gati.evict.trace.records import Trace, make_trace

if TYPE_CHECKING:
    from gati.evict.embed.cache import EmbeddingCache
    from gati.evict.embed.pool import PagePool
    from gati.evict.embed.redis_tier import RedisTier
    from gati.evict.embed.scores import RowScores
    from gati.evict.embed.tiers import FileTier, MemoryTier
    from gati.evict.remote import ContinuationClient

# These need torch or httpx, which nothing else here does, so each is imported when first used.
_LATE = {
    "ContinuationClient": "gati.evict.remote",
    "EmbeddingCache": "gati.evict.embed.cache",
    "FileTier": "gati.evict.embed.tiers",
    "MemoryTier": "gati.evict.embed.tiers",
    "PagePool": "gati.evict.embed.pool",
    "RedisTier": "gati.evict.embed.redis_tier",
    "RowScores": "gati.evict.embed.scores",
}

__all__ = [
    "ContinuationClient",
    "EmbeddingCache",
    "FileTier",
    "LIMIT",
    "MemoryTier",
    "POLICIES",
    "PagePool",
    "PolicyOutcome",
    "PrefixCache",
    "PrefixMatch",
    "RedisTier",
    "RowScores",
    "Trace",
    "TraceReplay",
    "bound",
    "make_trace",
    "read_trace",
    "replay",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
