"""Plans: the deployment of each published form under one placement, with its expected figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gati.composition.candidates import full_candidates, reach_by_block, relaxed_candidates
from gati.composition.certificate import Certificate
from gati.composition.composition import Exit, Expected, Objective
from gati.composition.full import solve_full
from gati.composition.outcomes import SplitOutcomes
from gati.composition.problem import Candidate, Estimate, Problem, Selection, estimate
from gati.composition.relaxed import sweep_relaxed
from gati.composition.replay import Replay
from gati.exploration.library import Library
from gati.types import Placement, Profile, Trial

DEFAULT_CONFIDENCE = 0.95
CLEARLY_FASTER = 0.85
# Time that lookups may add to an input that misses every cache, as a share of the network's time. A student
# that answers four of five inputs may well take a third, and the network itself in 8-bit integers two. What
# such lookups must save grows with what they add, see `contests.REPAYS`.
SLOWDOWN = 1.0


@dataclass(frozen=True)
class Settings:
    """The operator's settings for a composition."""

    accuracy: float = 0.99
    confidence: float | None = DEFAULT_CONFIDENCE
    memory_limit_bytes: int | None = None
    objective: Objective = "exact"
    solver: str = "auto"
    placement: Placement | Literal["auto"] = "auto"
    backend: str = "auto"
    name: str = "default"
    slowdown: float | Literal["auto"] | None = "auto"
    per_class: bool = False  # certify the agreement of each class on its own
    threads: int | Literal["auto"] | None = None  # None: as many as explore used

    def slowdown_limit_ms(self, profile: Profile) -> float | None:
        """The time that all lookups together may add to a request that misses every cache; None: no limit."""
        share = SLOWDOWN if self.slowdown == "auto" else self.slowdown
        return None if share is None or share == math.inf else share * profile.base_ms


@dataclass(frozen=True)
class CandidatePlan:
    """One candidate: the choice under one placement, with its expected figures."""

    placement: Placement
    choice: Selection
    exits: tuple[Exit, ...]
    expected: Expected
    replayed: bool
    certificate: Certificate | None = None


def placement_rank(placement: Placement, mean_latency_ms: float) -> tuple[float, bool]:
    """Return the key by which "auto" chooses a placement; the smallest wins.

    Overlapped lookups take a core or a stream, and their cost is measured with more noise. So they are chosen
    only if they are expected to be clearly faster.
    """
    inline = placement == "inline"
    return (mean_latency_ms if inline else mean_latency_ms / CLEARLY_FASTER, not inline)


def plan_published(
    library: Library, settings: Settings, placement: Placement, select: SplitOutcomes | None
) -> CandidatePlan:
    """Solve one of the published forms for one placement."""
    make = relaxed_candidates if settings.objective == "relaxed" else full_candidates
    candidates = make(library.trials, library.operating_points, placement, settings.accuracy)
    # as published: one lookup at a time for both placements
    problem = problem_of(library, settings, candidates, one_lookup_at_a_time=True)

    def expect(chosen: tuple[Candidate, ...]) -> Estimate | Replay:
        return estimate(problem, chosen) if select is None else select.replay(problem, chosen)

    if settings.objective == "relaxed":
        choice = sweep_relaxed(problem, solver=settings.solver, expect=expect)
    else:
        choice = solve_full(problem, solver=settings.solver)
        if expect(choice.candidates).mean_latency_ms >= problem.base_ms:
            choice = Selection((), problem.base_ms, choice.gap, choice.solver)
    return describe(library, problem, placement, choice, select)


def problem_of(
    library: Library, settings: Settings, candidates: tuple[Candidate, ...], *, one_lookup_at_a_time: bool
) -> Problem:
    """Return the problem of choosing among the `candidates` that fit the memory limit by themselves."""
    limit = settings.memory_limit_bytes
    return Problem(
        reach_ms=reach_by_block(library.manifest.blocks),
        base_ms=library.manifest.profile.base_ms,
        candidates=tuple(c for c in candidates if limit is None or c.memory_bytes <= limit),
        accuracy=settings.accuracy,
        memory_limit_bytes=limit,
        one_lookup_at_a_time=one_lookup_at_a_time,
        slowdown_limit_ms=settings.slowdown_limit_ms(library.manifest.profile),
    )


def describe(
    library: Library, problem: Problem, placement: Placement, choice: Selection, select: SplitOutcomes | None
) -> CandidatePlan:
    """Return the plan for a choice, with figures for each exit and the whole, replayed if possible."""
    table = estimate(problem, choice.candidates)
    rates, exit_ms = table.effective_hit_rates, table.exit_ms
    accuracies = tuple(candidate.accuracy for candidate in choice.candidates)
    mean_ms, hit_rate, agreement = table.mean_latency_ms, table.hit_rate, table.agreement
    if select is not None:
        outcome = select.replay(problem, choice.candidates)
        rates = tuple(hits / len(select) for hits in outcome.hits)
        pairs = zip(outcome.agreeing, outcome.hits, strict=True)
        accuracies = tuple(agreeing / hits if hits else 1.0 for agreeing, hits in pairs)
        mean_ms, hit_rate, agreement = outcome.mean_latency_ms, outcome.hit_rate, outcome.agreement
    trials = {trial.trial_id: trial for trial in library.trials}
    exits = tuple(
        _exit(candidate, trials[candidate.trial_id], placement, rate, accuracy, latency_ms)
        for candidate, rate, accuracy, latency_ms in zip(
            choice.candidates, rates, accuracies, exit_ms, strict=True
        )
    )
    memory = sum(candidate.memory_bytes for candidate in choice.candidates)
    expected = Expected(mean_ms, problem.base_ms, problem.base_ms / mean_ms, hit_rate, agreement, memory)
    return CandidatePlan(placement, choice, exits, expected, replayed=select is not None)


def _exit(
    candidate: Candidate, trial: Trial, placement: Placement, rate: float, accuracy: float, exit_ms: float
) -> Exit:
    return Exit(
        trial_id=candidate.trial_id,
        block=trial.block,
        block_index=candidate.block_index,
        variant=candidate.variant,
        selector=trial.selector,
        threshold=candidate.threshold,
        placement=placement,
        expected_hit_rate=rate,
        expected_agreement=accuracy,
        lookup_ms=candidate.lookup_ms,
        memory_bytes=candidate.memory_bytes,
        exit_ms=exit_ms,
        penalty_ms=candidate.penalty_ms,
    )
