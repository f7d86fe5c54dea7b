"""A composition that was written, as candidates of the problem that it answers."""

from __future__ import annotations

from gati.composition.candidates import lookup_cost, reach_by_block
from gati.composition.composition import Composition, Exit
from gati.composition.problem import Candidate, Problem
from gati.errors import CompositionError
from gati.exploration.library import Library

__all__ = ["problem_deployed"]


def problem_deployed(composition: Composition, library: Library) -> Problem:
    """Return the problem whose candidates are the composition's exits, in forward order.

    `library` has the latencies of the composition's backend. Raises CompositionError when an exit's trial is
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
