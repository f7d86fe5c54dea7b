"""Why each exit of a composition was chosen, the loss without it, and its remaining potential.

The composition is replayed in float32 with and without each exit. An engine of reduced precision would have
to be converted and run again for each exit, so it is replayed in float32, too. Neither figure then includes
the answers that the engine changes by itself: the two can be compared with each other, but not with the
engine's expected figures. The sentence says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gati.composition.candidates import lookup_cost
from gati.composition.composition import COARSE_LOOKUPS, REDUCED, Composition, Exit
from gati.composition.costs import as_composed
from gati.composition.headroom import ExitHeadroom
from gati.composition.outcomes import SplitOutcomes
from gati.composition.problem import Candidate, Estimate, estimate
from gati.composition.prospects import headroom_of, problem_deployed
from gati.composition.replay import Replay
from gati.exploration.library import SELECT, Library
from gati.units import percent


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One exit, and the figures of the composition with and without it, all other exits unchanged.

    `headroom` has the figures if this exit's lookup were free, its selector perfect, or all its answers
    right. `as_float32` says that the engine changes some answers by itself, which these figures leave out.
    """

    exit: Exit
    with_mean_latency_ms: float
    with_agreement: float
    without_mean_latency_ms: float
    without_agreement: float
    rivals: int  # other trained variants at the same block
    sentence: str
    headroom: ExitHeadroom
    as_float32: bool = False


def explain(composition: Composition, library: Library | str | Path) -> tuple[Explanation, ...]:
    """Explain every exit, from the outcomes of the select split if the library has them, else from its table.

    Raises CompositionError if an exit's trial is not in the library.
    """
    if not isinstance(library, Library):
        library = Library.open(library)
    library = as_composed(library, composition.backend, composition.measured_on)
    problem = problem_deployed(composition, library)
    candidates = problem.candidates
    select = SplitOutcomes(library, SELECT) if library.has_outcomes else None

    def expect(chosen: tuple[Candidate, ...]) -> Replay | Estimate:
        return select.replay(problem, chosen) if select else estimate(problem, chosen)

    whole, as_float32 = expect(candidates), composition.backend.endswith((*REDUCED, COARSE_LOOKUPS))
    headroom = headroom_of(problem, library, select)
    explained = []
    for position, exit_ in enumerate(composition.exits):
        others = candidates[:position] + candidates[position + 1 :]
        without = expect(others)
        rivals = sum(
            trial.block_index == exit_.block_index
            and trial.status == "trained"
            and lookup_cost(trial, exit_.placement) is not None
            and trial.trial_id != exit_.trial_id
            for trial in library.trials
        )
        explained.append(
            Explanation(
                exit=exit_,
                with_mean_latency_ms=whole.mean_latency_ms,
                with_agreement=whole.agreement,
                without_mean_latency_ms=without.mean_latency_ms,
                without_agreement=without.agreement,
                rivals=rivals,
                sentence=_sentence(exit_, composition, whole, without, rivals, as_float32=as_float32),
                headroom=headroom.exits[position],
                as_float32=as_float32,
            )
        )
    return tuple(explained)


def _sentence(
    exit_: Exit,
    composition: Composition,
    whole: Replay | Estimate,
    without: Replay | Estimate,
    rivals: int,
    *,
    as_float32: bool,
) -> str:
    share = exit_.exit_ms / composition.expected.base_latency_ms
    slower = without.mean_latency_ms / whole.mean_latency_ms - 1.0
    against = f", chosen from {rivals + 1} variants there" if rivals else ""
    basis = (
        f"; in float32, without the answers that {composition.backend} changes by itself"
        if as_float32
        else ""
    )
    return (
        f"{percent(exit_.expected_hit_rate)} of requests leave after {percent(share, 0)} of the network's "
        f"time{against}; without it the mean would be {percent(abs(slower))} "
        f"{'longer' if slower >= 0 else 'shorter'} and agreement {percent(without.agreement, 2)} "
        f"instead of {percent(whole.agreement, 2)}{basis}"
    )
