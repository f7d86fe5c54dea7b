"""Learned eviction for full caches.

from gati import evict

trace = evict.read_trace("trace.jsonl.gz")
result = evict.replay(trace, sizes=[2000], policies=["lru", "gati", "opt"])

cache = evict.PrefixCache(blocks=2000, policy="gati")  # in an engine of your own
"""

from gati.evict.policy.guard import bound
from gati.evict.policy.registry import LIMIT, POLICIES
from gati.evict.prefix import PrefixCache, PrefixMatch
from gati.evict.replays.replay import replay
from gati.evict.replays.result import PolicyOutcome, TraceReplay
from gati.evict.trace.read import read_trace
from gati.evict.trace.records import Trace, make_trace

__all__ = [
    "LIMIT",
    "POLICIES",
    "PolicyOutcome",
    "PrefixCache",
    "PrefixMatch",
    "Trace",
    "TraceReplay",
    "bound",
    "make_trace",
    "read_trace",
    "replay",
]
