"""Every policy by name."""

from __future__ import annotations

from gati.errors import EvictError
from gati.evict.policy.base import EvictionPolicy
from gati.evict.policy.both import FollowCheaper
from gati.evict.policy.guard import Gati
from gati.evict.policy.keyed import Fifo, Lfu, Lru, Slru, TailLru
from gati.evict.policy.lpc import LaruLpc, Lpc, LpcOracle
from gati.evict.policy.markers import GuardedBelady, LMarker, PredictiveMarker
from gati.evict.policy.predicting import FurthestPredicted, Halp, Laru, OptimalLeaf

LIMIT = "opt"  # not a policy but an upper bound: Belady's hits on independent blocks

POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (
        Lru,
        Fifo,
        Lfu,
        Slru,
        TailLru,
        FurthestPredicted,
        Halp,
        OptimalLeaf,
        Laru,
        Gati,
        FollowCheaper,
        PredictiveMarker,
        LMarker,
        GuardedBelady,
        Lpc,
        LpcOracle,
        LaruLpc,
    )
}


def policy_named(name: str, *, flat: bool) -> type[EvictionPolicy]:
    """The class of a policy. Raises EvictError for unknown names, and for policies for other traces."""
    if name == LIMIT:
        raise EvictError(f"{LIMIT} is not a policy but an upper bound, for replays only; use lru or gati")
    found = POLICIES.get(name)
    if found is None:
        raise EvictError(f"unknown policy {name!r}; choose one of {', '.join([*POLICIES, LIMIT])}")
    if found.flat_only and not flat:
        raise EvictError(f"policy {name} supports only independent blocks; use --flat, or another policy")
    if found.tree_only and flat:
        raise EvictError(f"policy {name} supports only conversations; leave out --flat")
    return found
