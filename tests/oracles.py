"""Brute force: slow, obvious answers that the optimisers are held against."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from gati.composition.problem import Candidate, Problem
from gati.composition.relaxed import relaxed_score

Chosen = tuple[Candidate, ...]


def every_choice(problem: Problem) -> Iterator[Chosen]:
    """Every way to take at most one candidate a block within memory and one lookup at a time."""
    blocks = sorted({candidate.block_index for candidate in problem.candidates})
    options = [[None, *(c for c in problem.candidates if c.block_index == block)] for block in blocks]
    for picks in product(*options):
        chosen = tuple(pick for pick in picks if pick is not None)
        if _fits(problem, chosen):
            yield chosen


def _fits(problem: Problem, chosen: Chosen) -> bool:
    limit = problem.memory_limit_bytes
    if limit is not None and sum(c.memory_bytes for c in chosen) > limit:
        return False
    slowest = problem.slowdown_limit_ms
    if slowest is not None and sum(c.penalty_ms for c in chosen) > slowest + 1e-9:
        return False
    if problem.one_lookup_at_a_time:
        # as published: only the next chosen block is looked at
        for at in range(len(chosen) - 1):
            this, following = chosen[at], chosen[at + 1]
            window = problem.reach_ms[following.block_index] - problem.reach_ms[this.block_index]
            if this.lookup_ms > window + 1e-9:
                return False
    return True


def best_relaxed_score(problem: Problem, alpha: float, most_caches: int | None = None) -> float:
    """The largest sum of published scores."""
    most = len(problem.reach_ms) if most_caches is None else most_caches
    return max(
        sum(relaxed_score(problem, c, alpha) for c in chosen)
        for chosen in every_choice(problem)
        if len(chosen) <= most and all(c.accuracy >= problem.accuracy for c in chosen)
    )


def best_full_latency(problem: Problem) -> float:
    """The least expected latency of the published full form, penalties charged request by request."""
    return min(latency for chosen in every_choice(problem) for latency in _full_latency(problem, chosen))


def _full_latency(problem: Problem, chosen: Chosen) -> Iterator[float]:
    left = latency = agreement = penalties = 0.0
    for candidate in chosen:
        effective = candidate.hit_rate - left
        if effective < 0.0:
            return
        latency += effective * (problem.reach_ms[candidate.block_index] + penalties + candidate.lookup_ms)
        agreement += effective * candidate.accuracy
        left += effective
        penalties += candidate.penalty_ms
    if agreement + (1.0 - left) >= problem.accuracy - 1e-9:
        yield latency + (1.0 - left) * (problem.base_ms + penalties)


def replay_one_by_one(exits, base_class, base_ms):
    """Mean latency, hits per exit, and wrong answers, one input after the other."""
    hits, wrong, spent = [0] * len(exits), [], 0.0
    for i, base in enumerate(base_class):
        clock = 0.0
        for position, exit_ in enumerate(exits):
            if np.float32(exit_.score[i]) >= np.float32(exit_.threshold):
                hits[position] += 1
                wrong.append(bool(exit_.predicted[i] != base))
                spent += exit_.cost.reach_ms + clock + exit_.cost.lookup_ms
                break
            clock += exit_.cost.penalty_ms
        else:
            wrong.append(False)
            spent += base_ms + clock
    return spent / len(base_class), hits, wrong


def best_exact_latency(instance, budget: int) -> float:
    """The least mean latency over every set of trials with every cut, replayed one input after the other."""
    blocks = sorted(set(instance.block.tolist()))
    options = [
        [
            None,
            *(
                (t, c + 1)
                for t in np.flatnonzero(instance.block == b)
                for c in np.flatnonzero(instance.may_cut[t])
            ),
        ]
        for b in blocks
    ]
    best = np.inf
    for picks in product(*options):
        chosen = tuple((int(t), int(c)) for t, c in (pick for pick in picks if pick is not None))
        if _exact_fits(instance, chosen):
            latency, disagreements = _exact_outcome(instance, chosen)
            if disagreements <= budget:
                best = min(best, latency)
    return best


def _exact_fits(instance, chosen) -> bool:
    limit = instance.memory_limit_bytes
    if limit is not None and sum(int(instance.memory_bytes[t]) for t, _ in chosen) > limit:
        return False
    slowest = instance.slowdown_limit_ms
    if slowest is not None and sum(float(instance.penalty_ms[t]) for t, _ in chosen) > slowest + 1e-9:
        return False
    if instance.one_lookup_at_a_time:
        for (t, _), (following, _) in zip(chosen, chosen[1:], strict=False):
            if instance.lookup_ms[t] > instance.reach_ms[following] - instance.reach_ms[t] + 1e-9:
                return False
    return True


def _exact_outcome(instance, chosen) -> tuple[float, int]:
    spent, disagreements = 0.0, 0
    for i in range(instance.inputs):
        clock = 0.0
        for t, cut in chosen:
            if i in instance.order[t, :cut].tolist():
                spent += clock + instance.reach_ms[t] + instance.lookup_ms[t]
                disagreements += int(instance.wrong[t, i])
                break
            clock += instance.penalty_ms[t]
        else:
            spent += clock + instance.base_ms
    return spent / instance.inputs, disagreements
