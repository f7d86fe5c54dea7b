"""`evict.replay`: a trace through one cache for every size, policy and seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gati.errors import EvictError
from gati.evict.cache import BlockCache
from gati.evict.policy.base import EvictionPolicy
from gati.evict.policy.guard import EXCESS_SHARE, Gati
from gati.evict.policy.registry import LIMIT, make_policy, policy_named
from gati.evict.policy.sampled import SampledGati
from gati.evict.policy.weighed import PathCosts
from gati.evict.predict.named import (
    Continuation,
    Maker,
    continuation_oracle,
    continuation_source,
    predictor_named,
)
from gati.evict.replays.result import PolicyOutcome, TraceReplay
from gati.evict.seeds import check_seed
from gati.evict.trace.future import belady_hits
from gati.evict.trace.numbering import Ints
from gati.evict.trace.records import Trace

Progress = Callable[[int, int], None]  # blocks replayed so far, total blocks
_SAMPLES = 200
_TOLD_EVERY = 512  # requests


def replay(
    trace: Trace,
    sizes: Sequence[int],
    policies: Sequence[str] = ("lru", "gati", "opt-leaf", "opt"),
    *,
    predictor: str = "reuse",
    continuation: Continuation | None = None,
    gap_s: float = 100.0,
    cost_growth: float = 0.0,
    seeds: Sequence[int] = (0,),
    progress: Progress | None = None,
) -> TraceReplay:
    """Replay `trace` in caches of `sizes` blocks under each of `policies`, and return what they hit.

    A size or policy that is named twice counts once.
    `predictor` is `reuse`, `oracle`, `noise:SHARE`, `lognormal:SIGMA` or the folder of a trained model;
    policies without predictions are replayed only once. `opt-leaf` always knows the future, and `opt` is the
    upper bound of all policies. `lpc` and `laru+lpc` use `continuation`: the folder of a model trained on
    dialogues, or the probabilities [requests] that conversations continue. `gap_s` is the mean pause before
    a user's next prompt, in seconds. `cost_growth` is as in `PrefixCache`; outcomes say what time was saved.

    Raises EvictError for sizes below 1 or above the number of distinct blocks, for unknown names, for seeds
    out of range, and for a growth below zero or of blocks without parents.
    """
    sizes, policies = list(dict.fromkeys(sizes)), list(dict.fromkeys(policies))
    for seed in seeds:
        check_seed(seed)
    costs = PathCosts(cost_growth, flat=trace.kind == "flat")
    for size in sizes:
        if not 1 <= size <= trace.distinct:
            raise EvictError(
                f"the cache size is {size} blocks; give 1 to {trace.distinct}, the number of distinct blocks "
                f"in {trace.name}"
            )
    plans = _plans(trace, policies, predictor, continuation, gap_s, seeds)
    total = len(trace.blocks) * len(sizes) * sum(len(plan.seeds) for plan in plans)
    done = 0
    outcomes = []
    for size in sizes:
        for plan in plans:
            for seed in plan.seeds:

                def tell(blocks: int, before: int = done) -> None:
                    if progress is not None:
                        progress(before + blocks, total)

                if plan.policy == LIMIT:
                    outcomes.append(_limit(trace, size))
                else:
                    outcomes.append(_one(trace, size, plan, seed, costs, tell))
                done += len(trace.blocks)
    if progress is not None:
        progress(total, total)
    return TraceReplay(trace.summary(), _with_gaps(outcomes))


class _Plan(NamedTuple):
    """A policy to replay with these seeds, and what its predictor is called."""

    policy: str
    seeds: Sequence[int]
    maker: Maker | None = None
    predictor: str | None = None


def _plans(
    trace: Trace,
    policies: Sequence[str],
    predictor: str,
    continuation: Continuation | None,
    gap_s: float,
    seeds: Sequence[int],
) -> list[_Plan]:
    flat, once = trace.kind == "flat", seeds[:1]
    known = {name: policy_named(name, flat=flat) for name in policies if name != LIMIT}
    maker = predictor_named(predictor, trace, flat=flat)
    continues: Maker | None = None
    if any(policy.converses and not policy.foresees for policy in known.values()):
        continues = continuation_source(trace, continuation, gap_s=gap_s)
    given = "probabilities" if isinstance(continuation, np.ndarray) else str(continuation)
    plans = []
    for name in policies:
        policy = known.get(name)
        if policy is None or not policy.predicts:
            plans.append(_Plan(name, once))
        elif policy.foresees:
            oracle = (
                continuation_oracle(trace, gap_s=gap_s)
                if policy.converses
                else predictor_named("oracle", trace, flat=flat)
            )
            plans.append(_Plan(name, once, oracle))
        elif policy.converses:
            plans.append(_Plan(name, once, continues, given))
        else:
            plans.append(_Plan(name, seeds, maker, predictor))
    return plans


def _one(
    trace: Trace, size: int, plan: _Plan, seed: int, costs: PathCosts, tell: Callable[[int], None]
) -> PolicyOutcome:
    flat = trace.kind == "flat"
    policy = make_policy(plan.policy, size, plan.maker, flat=flat, seed=seed, cost_growth=costs.growth)
    cache = BlockCache(policy)
    hits = np.zeros(len(trace), dtype=np.int64)
    clock: list[int] = []
    excess: list[tuple[int, int, float, bool]] = []
    every = max(len(trace) // _SAMPLES, 1)
    starts, times = trace.starts, trace.time_s.tolist()
    timer = _timed(policy, clock)
    began = time.perf_counter()
    for number, ids in enumerate(trace.requests):
        hits[number] = cache.access(ids, times[number]).hits
        if isinstance(policy, (Gati, SampledGati)) and number % every == 0:
            requested = int(starts[number + 1])
            excess.append((requested, policy.excess, EXCESS_SHARE * requested, policy.following))
        if number % _TOLD_EVERY == 0:
            tell(int(starts[number]))
    seconds = time.perf_counter() - began
    timer()
    return _outcome(
        trace,
        hits,
        seconds,
        policy=plan.policy,
        capacity_blocks=size,
        predictor=plan.predictor,
        seed=seed,
        truncated=int((trace.lengths > size).sum()),
        evictions=cache.evicted,
        decision_us=_spread(clock),
        figures=cache.figures(),
        excess=excess,
        time_saved=sum(map(costs.upto, hits.tolist())) / sum(map(costs.upto, trace.lengths.tolist())),
    )


def _timed(policy: EvictionPolicy, clock: list[int]) -> Callable[[], None]:
    """Time the policy's evictions, in ns; returns a function that stops it."""
    evict, now = policy.evict, time.perf_counter_ns

    def timed(count: int, missing: list[int]) -> list[int]:
        began = now()
        removed = evict(count, missing)
        clock.append(now() - began)
        return removed

    policy.evict = timed  # type: ignore[method-assign]

    def end() -> None:
        del policy.evict

    return end


def _limit(trace: Trace, size: int) -> PolicyOutcome:
    began = time.perf_counter()
    hits = belady_hits(trace, size)
    seconds = time.perf_counter() - began
    return _outcome(trace, hits, seconds, policy=LIMIT, capacity_blocks=size, decision_us=_spread([]))


def _outcome(trace: Trace, hits: Ints, seconds: float, **others: Any) -> PolicyOutcome:
    """The outcome with these hits of each request, and its `others` fields."""
    requested, shared = len(trace.blocks), int(trace.shared.sum())
    beyond = int(np.maximum(hits - trace.shared, 0).sum())
    return PolicyOutcome(
        hits=int(hits.sum()),
        requested=requested,
        hit_rate=float(hits.sum() / requested),
        hit_rate_beyond_shared=beyond / max(requested - shared, 1),
        blocks_per_s=requested / max(seconds, 1e-9),
        **others,
    )


def _with_gaps(outcomes: list[PolicyOutcome]) -> list[PolicyOutcome]:
    known = {(each.policy, each.capacity_blocks): each.hit_rate for each in outcomes}
    filled = []
    for each in outcomes:
        low, high = (known.get((name, each.capacity_blocks)) for name in ("lru", "opt-leaf"))
        if low is not None and high is not None and high > low:
            each = replace(each, gap_closed=(each.hit_rate - low) / (high - low))
        filled.append(each)
    return filled


def _spread(nanoseconds: list[int]) -> dict[str, float]:
    values = np.asarray(nanoseconds or [0], dtype=np.float64) / 1e3
    p50, p99 = np.percentile(values, [50, 99])
    return {"mean": float(values.mean()), "p50": float(p50), "p99": float(p99)}
