"""Why each exit of a composition was chosen: what would be lost without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gati.compose.candidates import lookup_cost, reach_by_block
from gati.compose.composition import Composition, Exit
from gati.compose.costs import as_composed
from gati.compose.outcomes import SplitOutcomes
from gati.compose.problem import Candidate, Problem, estimate
from gati.errors import CompositionError
from gati.explore.library import SELECT, Library

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """One exit, and what is expected of the composition without it, all other exits staying as they are."""

    exit: Exit
    without_mean_latency_ms: float
    without_agreement: float
    rivals: int  # other trained variants at the same block
    sentence: str


def explain(composition: Composition, library: Library | str | Path) -> tuple[Explanation, ...]:
    """Explain every exit, on the select split's outcomes where the library has them, else from its table.

    Raises CompositionError when an exit's trial is not in the library.
    """
    if not isinstance(library, Library):
        library = Library.open(library)
    library = as_composed(library, composition.backend)
    candidates = tuple(_candidate(exit_, composition, library) for exit_ in composition.exits)
    problem = Problem(
        reach_ms=reach_by_block(library.manifest.blocks),
        base_ms=library.manifest.profile.base_ms,
        candidates=candidates,
        accuracy=composition.accuracy_target,
    )
    select = SplitOutcomes(library, SELECT) if library.has_outcomes else None
    explained = []
    for position, exit_ in enumerate(composition.exits):
        others = candidates[:position] + candidates[position + 1 :]
        without = select.replay(problem, others) if select else estimate(problem, others)
        rivals = sum(
            trial.block_index == exit_.block_index
            and trial.status == "trained"
            and trial.trial_id != exit_.trial_id
            for trial in library.trials
        )
        sentence = _sentence(exit_, composition, without.mean_latency_ms, without.agreement, rivals)
        explained.append(Explanation(exit_, without.mean_latency_ms, without.agreement, rivals, sentence))
    return tuple(explained)


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


def _sentence(
    exit_: Exit, composition: Composition, without_ms: float, without_agreement: float, rivals: int
) -> str:
    expected = composition.expected
    share = exit_.exit_ms / expected.base_latency_ms
    slower = without_ms / expected.mean_latency_ms - 1.0
    against = f", chosen from {rivals + 1} variants there" if rivals else ""
    return (
        f"{exit_.expected_hit_rate:.1%} of requests leave after {share:.0%} of the network's time{against}; "
        f"without it the mean would be {abs(slower):.1%} {'longer' if slower >= 0 else 'shorter'} "
        f"and agreement {without_agreement:.2%} instead of {expected.agreement:.2%}"
    )
