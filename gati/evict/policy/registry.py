"""Every policy by name."""

from __future__ import annotations

from typing import Any

from gati.errors import EvictError
from gati.evict.index.tree import RunTree
from gati.evict.policy.base import EvictionPolicy
from gati.evict.policy.both import FollowCheaper
from gati.evict.policy.guard import Gati
from gati.evict.policy.keyed import Fifo, Lfu, Lru, Slru, TailLru
from gati.evict.policy.lpc import LaruLpc, Lpc, LpcOracle
from gati.evict.policy.markers import GuardedBelady, LMarker, PredictiveMarker
from gati.evict.policy.predicting import FurthestPredicted, Halp, Laru, OptimalLeaf
from gati.evict.policy.sampled import WHOLE_SHADOW, SampledGati
from gati.evict.predict.named import Maker

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


def make_policy(
    name: str,
    capacity: int,
    maker: Maker | None = None,
    *,
    flat: bool = False,
    seed: int = 0,
    cost_growth: float = 0.0,
) -> EvictionPolicy:
    """Make the policy `name` for a cache of `capacity` blocks; `maker` makes its predictor.

    Policies that do not weigh costs ignore `cost_growth`, so that they can be compared with those that do.
    Raises EvictError as `policy_named` does, and for a policy that lacks a predictor.
    """
    made: Any = policy_named(name, flat=flat)  # their options differ
    if made is Gati and capacity > WHOLE_SHADOW:
        made = SampledGati
    options: dict[str, Any] = {"seed": seed}
    if made.predicts:
        if maker is None:
            raise EvictError(f"policy {name} needs a predictor, such as reuse")
        options["predictor"] = maker(capacity, seed)
    if made.weighs_costs:
        options["cost_growth"] = cost_growth
    policy: EvictionPolicy = made(RunTree(flat=flat), capacity, **options)
    return policy
