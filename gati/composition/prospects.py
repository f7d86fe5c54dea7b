"""Computing the headroom of a composition, by replay on the select split or, without outcomes, by the table.

The replay is in float32 even for an engine of reduced precision, see `gati.composition.explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gati.composition.candidates import lookup_cost, reach_by_block
from gati.composition.composition import Composition, Exit
from gati.composition.costs import as_composed
from gati.composition.headroom import ExitHeadroom, Headroom, Prospect
from gati.composition.outcomes import SplitOutcomes, cost_of
from gati.composition.problem import Candidate, Problem, estimate
from gati.composition.replay import ExitCost, ReplayExit, replay
from gati.errors import CompositionError
from gati.exploration.library import SELECT, Library
from gati.types import Trial, TrialId


@dataclass(frozen=True)
class _Assumption:
    """The perfect properties that an exit is assumed to have; see `gati.composition.headroom`."""

    free: bool = False
    knowing: bool = False
    right: bool = False


_UNCHANGED = _Assumption()
_FREE, _KNOWING, _RIGHT = _Assumption(free=True), _Assumption(knowing=True), _Assumption(right=True)
_FREE_AND_KNOWING = _Assumption(free=True, knowing=True)

_LEAST = 1e-3  # least share of the network's time: with a free lookup at the input, the latency could be 0

_Compute = Callable[[Sequence[_Assumption]], Prospect]


def with_headroom(composition: Composition, library: Library) -> Composition:
    """Return the composition with its headroom, if it has exits. Raises CompositionError as `explain`."""
    if not composition.exits:
        return composition
    library = as_composed(library, composition.backend, composition.measured_on)
    select = SplitOutcomes(library, SELECT) if library.has_outcomes else None
    headroom = headroom_of(problem_deployed(composition, library), library, select)
    return replace(composition, headroom=headroom)


def headroom_of(problem: Problem, library: Library, select: SplitOutcomes | None) -> Headroom:
    """Return the headroom of the composition of all `problem.candidates`, which are in forward order."""
    trials = {trial.trial_id: trial for trial in library.trials}
    compute = _by_table(problem, trials) if select is None else _by_replay(problem, select)
    count = len(problem.candidates)

    def one(position: int, assumption: _Assumption) -> Prospect:
        return compute([assumption if at == position else _UNCHANGED for at in range(count)])

    return Headroom(
        inputs=0 if select is None else len(select),
        chosen=compute([_UNCHANGED] * count),
        exits=tuple(
            ExitHeadroom(
                candidate.trial_id,
                trials[candidate.trial_id].block,
                free=one(position, _FREE),
                knowing=one(position, _KNOWING),
                right=one(position, _RIGHT),
            )
            for position, candidate in enumerate(problem.candidates)
        ),
        free=compute([_FREE] * count),
        oracle=compute([_KNOWING] * count),
        free_oracle=compute([_FREE_AND_KNOWING] * count),
    )


def _by_replay(problem: Problem, select: SplitOutcomes) -> _Compute:
    everything = np.ones(len(select), dtype=np.float32)

    def under(candidate: Candidate, assumption: _Assumption) -> ReplayExit:
        outcomes, cost = select.trial(candidate.trial_id), cost_of(problem, candidate)
        found = ReplayExit(outcomes.score, outcomes.predicted, candidate.threshold, cost)
        if assumption.free:
            found = replace(found, cost=ExitCost(cost.reach_ms, lookup_ms=0.0, penalty_ms=0.0))
        if assumption.knowing:
            agrees = (outcomes.predicted == select.base_class).astype(np.float32)
            found = replace(found, score=agrees, threshold=1.0)
        if assumption.right:
            found = replace(found, score=everything, predicted=select.base_class, threshold=1.0)
        return found

    def compute(assumptions: Sequence[_Assumption]) -> Prospect:
        exits = [under(*pair) for pair in zip(problem.candidates, assumptions, strict=True)]
        outcome = replay(exits, select.base_class, problem.base_ms)
        return _prospect(problem, outcome.mean_latency_ms, outcome.agreement)

    return compute


def _by_table(problem: Problem, trials: dict[TrialId, Trial]) -> _Compute:
    def under(candidate: Candidate, assumption: _Assumption) -> Candidate:
        if assumption.free:
            candidate = replace(candidate, lookup_ms=0.0, penalty_ms=0.0)
        if assumption.knowing:
            # the share of all inputs with the base model's class, at least that of its correct hits
            agreement = trials[candidate.trial_id].agreement or 0.0
            rate = max(agreement, candidate.hit_rate * candidate.accuracy)
            candidate = replace(candidate, hit_rate=rate, accuracy=1.0)
        if assumption.right:
            candidate = replace(candidate, hit_rate=1.0, accuracy=1.0)
        return candidate

    def compute(assumptions: Sequence[_Assumption]) -> Prospect:
        outcome = estimate(
            problem, [under(*pair) for pair in zip(problem.candidates, assumptions, strict=True)]
        )
        return _prospect(problem, outcome.mean_latency_ms, outcome.agreement)

    return compute


def _prospect(problem: Problem, mean_latency_ms: float, agreement: float) -> Prospect:
    counted_ms = max(mean_latency_ms, _LEAST * problem.base_ms)
    return Prospect(mean_latency_ms=mean_latency_ms, gain=problem.base_ms / counted_ms, agreement=agreement)


def problem_deployed(composition: Composition, library: Library) -> Problem:
    """Return the problem whose candidates are the composition's exits, in forward order.

    `library` has the latencies of the composition's backend. Raises CompositionError if an exit's trial is
    not in it.
    """
    return Problem(
        reach_ms=reach_by_block(library.manifest.blocks),
        base_ms=library.manifest.profile.base_ms,
        candidates=tuple(_candidate(exit_, composition, library) for exit_ in composition.exits),
        accuracy=composition.accuracy_target,
    )


def _candidate(exit_: Exit, composition: Composition, library: Library) -> Candidate:
    trial = next((trial for trial in library.trials if trial.trial_id == exit_.trial_id), None)
    cost = None if trial is None else lookup_cost(trial, composition.placement)
    if cost is None:
        raise CompositionError(
            f"composition {composition.name!r} uses trial {exit_.trial_id!r}, which this library lacks "
            f"for {composition.placement} lookups; compose again"
        )
    points = [point for point in library.operating_points if point.trial_id == exit_.trial_id]
    nearest = min(points, key=lambda point: abs(point.threshold - exit_.threshold), default=None)
    return Candidate(
        trial_id=exit_.trial_id,
        block_index=exit_.block_index,
        variant=exit_.variant,
        threshold=exit_.threshold,
        hit_rate=nearest.hit_rate if nearest else exit_.expected_hit_rate,
        accuracy=nearest.accuracy if nearest else exit_.expected_agreement,
        lookup_ms=cost.lookup_ms,
        penalty_ms=cost.penalty_ms,
        memory_bytes=exit_.memory_bytes,
    )
