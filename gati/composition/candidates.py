"""Turning the tables of a cache library into candidates of the optimisation problem."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from gati.composition.problem import Candidate
from gati.errors import LibraryError
from gati.types import BlockProfile, OperatingPoint, Placement, Trial, TrialId

# Accuracy levels at which the full form may set each variant's threshold, as multiples of the tolerated
# disagreement 1 - A: a cache that errs more than the target allows is useful if others err less.
# The first list that keeps the program small is used.
LEVELS = (
    (3.0, 2.0, 1.5, 1.0, 0.7, 0.4, 0.2, 0.0),
    (2.0, 1.5, 1.0, 0.5, 0.0),
    (2.0, 1.0, 0.5),
    (1.5, 1.0),
    (1.0,),
)
# Measured alone, a lookup in parallel with the network often seems free. Several per request do cost time,
# for shared memory bandwidth, synchronisation and cuts. This share of the lookup fits measured requests.
LEAST_OVERLAPPED_PENALTY = 0.3
MOST_CANDIDATES = 600  # the bound on pairs of candidates takes a second for these


class LookupCost(NamedTuple):
    """The cost of one lookup under a placement: the time to its answer, and the delay after a miss."""

    lookup_ms: float
    penalty_ms: float


def least_penalty_ms(lookup_ms: float, placement: Placement) -> float:
    """The least that a lookup adds to a request that misses: all of it, unless it is overlapped."""
    return lookup_ms if placement == "inline" else LEAST_OVERLAPPED_PENALTY * lookup_ms


def lookup_cost(trial: Trial, placement: Placement) -> LookupCost | None:
    """Return the measured cost of `trial` under `placement`, or None if it was not measured."""
    if placement == "inline":
        lookup, penalty = trial.lookup_ms, trial.lookup_ms
    else:
        lookup, penalty = trial.overlapped_lookup_ms, trial.overlapped_penalty_ms
        if lookup is not None and penalty is not None:
            penalty = max(penalty, least_penalty_ms(lookup, placement))
    if lookup is None or penalty is None or not (math.isfinite(lookup) and math.isfinite(penalty)):
        return None
    return LookupCost(lookup, max(0.0, penalty))


def has_placement(trials: Iterable[Trial], placement: Placement) -> bool:
    """Say whether any trained trial was measured under `placement`."""
    return any(trial.status == "trained" and lookup_cost(trial, placement) is not None for trial in trials)


def reach_by_block(blocks: Sequence[BlockProfile]) -> tuple[float, ...]:
    """Return the time to the end of each block in milliseconds, by block index, made monotonic.

    Noise can make the median of a later block lower than that of an earlier one.
    Raises LibraryError for a profile without usable latencies.
    """
    known = {block.index: block.reach_ms for block in blocks}
    if not known or not all(math.isfinite(reach) for reach in known.values()):
        raise LibraryError("the library's profile has no usable block latencies; explore again")
    reach = (known.get(index, -math.inf) for index in range(max(known) + 1))
    return tuple(max(0.0, value) for value in accumulate(reach, max))


def relaxed_candidates(
    trials: Sequence[Trial], points: Sequence[OperatingPoint], placement: Placement, accuracy: float
) -> tuple[Candidate, ...]:
    """Return each variant once, at its largest hit rate whose accuracy reaches the target."""
    return _candidates(trials, points, placement, (accuracy,))


def full_candidates(
    trials: Sequence[Trial], points: Sequence[OperatingPoint], placement: Placement, accuracy: float
) -> tuple[Candidate, ...]:
    """Return each variant at several accuracies around the target, without those that are dominated."""
    for multiples in LEVELS:
        levels = [1.0 - multiple * (1.0 - accuracy) for multiple in multiples]
        candidates = without_dominated(_candidates(trials, points, placement, levels))
        if len(candidates) <= MOST_CANDIDATES:
            break
    return candidates


def without_dominated(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Drop each candidate that another one at its block dominates: at least as good in every respect."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.block_index, _merits(c), c.trial_id, c.threshold)):
        if not any(c.block_index == candidate.block_index and _dominates(c, candidate) for c in kept):
            kept.append(candidate)
    return tuple(kept)


def _merits(candidate: Candidate) -> tuple[float, ...]:
    return (
        -candidate.hit_rate,
        -candidate.accuracy,
        candidate.lookup_ms,
        candidate.penalty_ms,
        candidate.memory_bytes,
    )


def _dominates(one: Candidate, other: Candidate) -> bool:
    return all(mine <= theirs for mine, theirs in zip(_merits(one), _merits(other), strict=True))


def _candidates(
    trials: Sequence[Trial], points: Sequence[OperatingPoint], placement: Placement, levels: Sequence[float]
) -> tuple[Candidate, ...]:
    by_trial: dict[TrialId, list[OperatingPoint]] = defaultdict(list)
    for point in points:
        if math.isfinite(point.threshold) and point.hit_rate > 0.0:
            by_trial[point.trial_id].append(point)
    candidates = []
    for trial in trials:
        cost = lookup_cost(trial, placement)
        if trial.status != "trained" or cost is None:
            continue
        for point in _points_at(by_trial[trial.trial_id], levels):
            candidates.append(_candidate(trial, point, cost))
    return tuple(candidates)


def _points_at(points: Sequence[OperatingPoint], levels: Iterable[float]) -> list[OperatingPoint]:
    chosen: dict[float, OperatingPoint] = {}
    for level in levels:
        accurate = [point for point in points if point.accuracy >= level]
        if accurate:
            best = max(accurate, key=lambda point: (point.hit_rate, point.accuracy))
            chosen[best.threshold] = best
    return list(chosen.values())


def _candidate(trial: Trial, point: OperatingPoint, cost: LookupCost) -> Candidate:
    return Candidate(
        trial_id=trial.trial_id,
        block_index=trial.block_index,
        variant=trial.variant,
        threshold=float(np.float32(point.threshold)),  # scores are float32, so compare in float32 everywhere
        hit_rate=point.hit_rate,
        accuracy=point.accuracy,
        lookup_ms=cost.lookup_ms,
        penalty_ms=cost.penalty_ms,
        memory_bytes=trial.memory_bytes,
    )
