"""One placement's exact problem on the select split, and the path of settings through it.

The path is limited by risk, not by disagreements. Among thousands of cuts some are correct on this split by
chance but not on the next, above all if no disagreement is allowed. So the loss of an input is the mean of
whether its answer is wrong and of the rate of wrong answers at its score (`smoothed_loss`). Risk also allows
finer steps among strict settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gati.composition.candidates import lookup_cost, reach_by_block
from gati.composition.composition import Objective
from gati.composition.exact import SEARCH, ExactChoice, solve_exact
from gati.composition.instance import Chosen, Instance, make_instance
from gati.composition.outcomes import SplitOutcomes
from gati.composition.plans import CandidatePlan, Settings, describe, plan_published, problem_of
from gati.composition.problem import Candidate, Selection
from gati.composition.risk import smoothed_loss
from gati.composition.search import ROUNDING, Frontier, improve_own, search_frontier
from gati.exploration.library import Library
from gati.types import Placement, Trial

PUBLISHED: tuple[Objective, ...] = ("relaxed", "full")
# Budgets on the path, as shares of the tolerated disagreements: a few strict ones, in case there are few
# inputs to certify on, then fine steps, so that the walk stops close to what can be certified.
STEPS = (0.05, 0.1, 0.2, *np.linspace(0.3, 1.4, 34))
FEW_STEPS = (0.1, 0.3, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 1.05, 1.2, 1.4)  # if the engine runs each
TRIFLE = 0.02  # exits that save less than this share of the mean latency are dropped
REPAYS = 0.1  # or less than this share of what a miss takes longer: few inputs would pay for the mean's sake
LEAST_SAVING = 0.03  # share of the network's latency; less may be an error of measuring, and misses cost more


@dataclass(frozen=True)
class Contest:
    """One placement's instance of the exact problem, and its trials."""

    placement: Placement
    trials: tuple[Trial, ...]
    instance: Instance
    frontier: Frontier


def contest_of(library: Library, settings: Settings, placement: Placement, select: SplitOutcomes) -> Contest:
    """Return one placement's exact problem on the select split, with the frontier of a first search."""
    reach_ms = reach_by_block(library.manifest.blocks)
    base_ms = library.manifest.profile.base_ms
    trials, costs = [], []
    for trial in sorted(library.trials, key=lambda trial: (trial.block_index, trial.trial_id)):
        cost = lookup_cost(trial, placement)
        if trial.status != "trained" or cost is None:
            continue
        fits = settings.memory_limit_bytes is None or trial.memory_bytes <= settings.memory_limit_bytes
        if fits and reach_ms[trial.block_index] + cost.lookup_ms < base_ms:
            trials.append(trial)
            costs.append(cost)
    outcomes = [select.trial(trial.trial_id) for trial in trials]
    lost = [select.costs_agreement(each.predicted) for each in outcomes]
    shape = (len(trials), len(select))
    instance = make_instance(
        block=[trial.block_index for trial in trials],
        score=np.array([each.score for each in outcomes], dtype=np.float32).reshape(shape),
        wrong=np.array(lost, dtype=bool).reshape(shape),
        reach_ms=[reach_ms[trial.block_index] for trial in trials],
        lookup_ms=[cost.lookup_ms for cost in costs],
        penalty_ms=[cost.penalty_ms for cost in costs],
        memory_bytes=[trial.memory_bytes for trial in trials],
        base_ms=base_ms,
        memory_limit_bytes=settings.memory_limit_bytes,
        one_lookup_at_a_time=placement == "overlapped",
        slowdown_limit_ms=settings.slowdown_limit_ms(library.manifest.profile),
    )
    frontier = search_frontier(instance)
    for objective in PUBLISHED:  # so that the result is never slower than theirs at the same agreement
        asked = replace(settings, objective=objective, solver="auto")
        plan = plan_published(library, asked, placement, select.tabled())
        frontier.found.add(_cuts(instance, trials, plan.choice.candidates))
    return Contest(placement, tuple(trials), instance, frontier)


def _cuts(instance: Instance, trials: Sequence[Trial], candidates: Sequence[Candidate]) -> Chosen:
    position = {trial.trial_id: index for index, trial in enumerate(trials)}
    pairs = [
        (trial, int((instance.score[trial] >= np.float32(candidate.threshold)).sum()))
        for candidate in candidates
        if (trial := position.get(candidate.trial_id)) is not None
    ]
    return tuple(sorted((trial, cut) for trial, cut in pairs if cut))


def solve_within(
    contest: Contest, budget: int, settings: Settings, *, thorough: bool = False, prove: bool = False
) -> ExactChoice:
    """The fastest composition of this contest with at most a budget of disagreements. Raises SolverError."""
    return solve_exact(
        contest.instance,
        budget,
        frontier=contest.frontier,
        solver=settings.solver,
        thorough=thorough,
        prove=prove or thorough,
    )


def path_within(
    instance: Instance, budget: float, steps: Sequence[float] = STEPS, *, frontier: Frontier | None = None
) -> list[ExactChoice]:
    """Return the settings to walk through, strictest first, each faster than the previous one.

    The first one saves at least `LEAST_SAVING` of the network's latency.

    `budget` is the number of disagreements tolerated among the inputs of `instance`; `steps` are shares of
    it. `frontier` is the result of `search_frontier` with the smoothed loss, for reuse across budgets.
    """
    if not instance.trials:
        return []
    risky = replace(instance, loss=smoothed_loss(instance))
    frontier = frontier or search_frontier(risky)
    path: list[ExactChoice] = []
    for risk in (share * budget for share in steps) if budget > 0.0 else ():
        chosen = _without_trifles(risky, frontier.within(float(risk), thorough=False), float(risk))
        outcome = instance.outcome(chosen)
        fastest_ms = path[-1].outcome.mean_latency_ms if path else (1.0 - LEAST_SAVING) * instance.base_ms
        if outcome.mean_latency_ms < fastest_ms:
            path.append(ExactChoice(chosen, outcome, 0.0, SEARCH))
    return path


def worthwhile(
    contest: Contest, choice: ExactChoice, budget: float, limit_ms: float = math.inf
) -> ExactChoice:
    """Return a choice of at most `budget` disagreements without the exits that save too little to be used.

    Exits without which the mean latency would be above `limit_ms` stay.
    """
    instance = contest.instance
    chosen = _without_trifles(instance, choice.chosen, budget, limit_ms)
    return replace(choice, chosen=chosen, outcome=instance.outcome(chosen))


def _without_trifles(instance: Instance, chosen: Chosen, budget: float, limit_ms: float = math.inf) -> Chosen:
    """Drop exits that save little once the others use the budget, or little for what they add to a miss.

    Each exit more is one more choice among many, and the best of many does better here than on new inputs.
    All that are dropped together save less than `TRIFLE`.
    """
    most_ms = (1.0 + TRIFLE) * instance.outcome(chosen).mean_latency_ms
    for trial in [trial for trial, _ in chosen]:
        fewer = tuple(pair for pair in chosen if pair[0] != trial)
        if instance.outcome(fewer).disagreements > budget + ROUNDING:
            continue
        fewer = improve_own(instance, fewer, budget)
        before, after = instance.outcome(chosen), instance.outcome(fewer)
        repaid = 1.0 + REPAYS * float(instance.penalty_ms[trial]) / instance.base_ms
        if after.mean_latency_ms <= min(limit_ms, max(most_ms, repaid * before.mean_latency_ms)):
            chosen = fewer
    return chosen


def candidates_of(contest: Contest, chosen: Chosen) -> tuple[Candidate, ...]:
    """Return the chosen trials as candidates, with thresholds instead of cuts."""
    instance = contest.instance
    return tuple(
        Candidate(
            trial_id=contest.trials[trial].trial_id,
            block_index=contest.trials[trial].block_index,
            variant=contest.trials[trial].variant,
            threshold=instance.threshold(trial, cut),
            hit_rate=cut / instance.inputs,
            accuracy=1.0 - float(instance.wrong[trial, instance.order[trial, :cut]].mean()),
            lookup_ms=float(instance.lookup_ms[trial]),
            penalty_ms=float(instance.penalty_ms[trial]),
            memory_bytes=int(instance.memory_bytes[trial]),
        )
        for trial, cut in chosen
    )


def plan_of(
    library: Library, settings: Settings, contest: Contest, select: SplitOutcomes, choice: ExactChoice
) -> CandidatePlan:
    """Return the plan that deploys `choice`, replayed on the select split."""
    candidates = candidates_of(contest, choice.chosen)
    overlapped = contest.placement == "overlapped"
    problem = problem_of(library, settings, candidates, one_lookup_at_a_time=overlapped)
    answer = Selection(candidates, choice.outcome.mean_latency_ms, choice.gap, choice.solver)
    return describe(library, problem, contest.placement, answer, select)
