"""Exact compositions with a certificate: a path of settings made on one split, walked on another.

The path is a family of compositions, each the fastest the search finds within a rising budget of risk on the
select split. It is fixed before the certify split is looked at, as the walk demands; the settings need not be
nested for that. Letting each budget choose its own exits wastes less than shifting the thresholds of one.

Risk, not disagreements: among thousands of cuts some are right by luck on this split and wrong on the next,
most of all where no disagreement is allowed. So half of what an input counts is whether its answer is wrong,
half how often answers are wrong at such a score (`smoothed_loss`). Risk also grades the strict end finely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gati.composition.candidates import lookup_cost, reach_by_block
from gati.composition.certificate import Certificate, Counts, certify, certify_every_class, required_inputs
from gati.composition.composition import Objective
from gati.composition.exact import SEARCH, ExactChoice, solve_exact
from gati.composition.instance import Chosen, Instance, make_instance
from gati.composition.outcomes import SplitOutcomes
from gati.composition.plans import (
    CandidatePlan,
    Settings,
    describe,
    placement_rank,
    plan_published,
    problem_of,
)
from gati.composition.problem import Candidate, Selection
from gati.composition.replay import Replay
from gati.composition.risk import smoothed_loss
from gati.composition.search import ROUNDING, Frontier, search_frontier
from gati.composition.verdicts import (
    DEFAULT_CONFIDENCE,
    count_losses,
    counts_of,
    replay_of,
    walk_through,
    with_certificate,
)
from gati.errors import CompositionError
from gati.exploration.library import Library
from gati.types import Placement, Trial

__all__ = [
    "Contest",
    "Proposal",
    "candidates_of",
    "contest_of",
    "path_within",
    "plan_exact",
    "plan_of",
    "propose",
]

PUBLISHED: tuple[Objective, ...] = ("relaxed", "full")
# Budgets on the path, as shares of the tolerated disagreements: a few strict ones, for when there is little
# to certify on, then fine steps, so that the walk stops close to what can be certified.
STEPS = (0.05, 0.1, 0.2, *np.linspace(0.3, 1.4, 34))
FEW_STEPS = (0.1, 0.3, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 1.05, 1.2, 1.4)  # where each is run by the engine
TRIFLE = 0.002  # of the mean latency


@dataclass(frozen=True)
class Contest:
    """One placement's instance of the exact problem, and the trials it is made of."""

    placement: Placement
    trials: tuple[Trial, ...]
    instance: Instance
    frontier: Frontier


@dataclass(frozen=True)
class Proposal:
    """What one engine would be walked through: its path, made on the select split alone, strictest first."""

    library: Library
    settings: Settings
    contest: Contest
    select: SplitOutcomes
    path: tuple[ExactChoice, ...]
    candidates: tuple[tuple[Candidate, ...], ...]  # of each setting of the path

    def hoped_ms(self, inputs: int, share: float = 1.0) -> float | None:
        """The mean latency that a walk over `inputs` should reach at a share of delta, from select alone.

        Errors are expected as often as on the select split, or as the risk says that they are, whichever is
        more: thresholds were chosen there. None where nothing is to be hoped for.
        """
        instance, count = self.contest.instance, len(self.select)
        if not self.path or inputs == 0:
            return None
        risky = replace(instance, loss=smoothed_loss(instance)) if instance.trials else instance
        scale = inputs / count
        replays: list[Replay] = []

        def expected() -> Iterator[list[Counts]]:
            for choice, candidates in zip(self.path, self.candidates, strict=True):
                replays.append(replay_of(self.library, self.settings, candidates, self.select))
                risk = risky.outcome(choice.chosen).disagreements + self.select.lost_without_exits
                parts = counts_of(self.library, self.settings, replays[-1], self.select)
                unseen = max(0.0, risk - float(replays[-1].wrong.sum())) / len(parts)
                sizes = [round(scale * size) for _, size in parts]
                yield [
                    (min(size, round(scale * (lost + unseen))), size)
                    for (lost, _), size in zip(parts, sizes, strict=True)
                ]

        reached = certify_every_class(
            expected(), self.settings.accuracy, self._delta, share=share, settings=len(self.path)
        )
        return None if reached.deployed is None else replays[reached.deployed].mean_latency_ms

    def walk(self, certified_on: SplitOutcomes | None, share: float = 1.0) -> Certificate:
        """Walk through the path on the certify split with a share of delta."""
        accuracy, path = self.settings.accuracy, self.candidates
        if certified_on is None or not path:
            return certify([(0, 0)], accuracy, self._delta, share=share)
        counted = (count_losses(self.library, self.settings, each, certified_on) for each in path)
        return walk_through(self.library, self.settings, counted, len(path), share)

    def deploy(self, certified_on: SplitOutcomes | None, share: float = 1.0) -> CandidatePlan:
        """Return the plan that deploys where the walk on the certify split ends.

        Raises CompositionError if the engine loses more than is allowed even without exits.
        """
        library, settings, contest = self.library, self.settings, self.contest
        certificate = self.walk(certified_on, share)
        if certificate.deployed is None and self.select.coarse:
            raise _too_coarse(library, settings, certificate.losses, certificate.inputs)
        if certificate.deployed is None or not self.path:
            nothing = ExactChoice((), contest.instance.outcome(()), 0.0, SEARCH)
            plan = plan_of(library, settings, contest, self.select, nothing)
        else:
            deployed = self.path[certificate.deployed]
            proven = _solve(contest, round(deployed.outcome.disagreements), settings, prove=True)
            bound_ms = min(proven.bound_ms, deployed.outcome.mean_latency_ms)
            plan = plan_of(library, settings, contest, self.select, replace(deployed, bound_ms=bound_ms))
        if not self.path:
            return plan
        return with_certificate(library, settings, plan, certificate, certified_on, self.candidates)

    @property
    def _delta(self) -> float:
        return 1.0 - (self.settings.confidence or DEFAULT_CONFIDENCE)


def plan_exact(
    library: Library,
    settings: Settings,
    placements: Sequence[Placement],
    select: SplitOutcomes,
    certified_on: SplitOutcomes | None,
) -> CandidatePlan:
    """Return the exact plan: placement and path chosen on `select`, the setting on `certified_on`.

    Without a wanted confidence the composition that just keeps the target on `select` is planned. Raises
    SolverError.
    """
    if settings.confidence is not None:
        count = 0 if certified_on is None else len(certified_on)
        return propose(library, settings, placements, select, count).deploy(certified_on)
    budget = _budget(settings, select)
    if budget < 0.0:
        raise _too_coarse(library, settings, select.lost_without_exits, len(select))
    contest, target = _best_contest(library, settings, placements, select, budget)
    return plan_of(library, settings, contest, select, target)


def propose(
    library: Library,
    settings: Settings,
    placements: Sequence[Placement],
    select: SplitOutcomes,
    inputs: int,
) -> Proposal:
    """Return what is to be walked through on `inputs` of the certify split, without looking at them.

    Raises CompositionError where so few could prove nothing of an engine that loses answers by itself.
    """
    if select.coarse:
        _check_inputs(library, settings, inputs)
    budget = _budget(settings, select)
    contest, target = _best_contest(library, settings, placements, select, budget)
    path = path_within(contest.instance, budget, FEW_STEPS if select.coarse else STEPS)
    if select.coarse:
        path.insert(0, replace(target, chosen=(), outcome=contest.instance.outcome(())))
    candidates = tuple(candidates_of(contest, choice.chosen) for choice in path)
    select.expect(candidates)
    return Proposal(library, settings, contest, select, tuple(path), candidates)


def _budget(settings: Settings, select: SplitOutcomes) -> float:
    return (1.0 - settings.accuracy) * len(select) - select.lost_without_exits


def _best_contest(
    library: Library,
    settings: Settings,
    placements: Sequence[Placement],
    select: SplitOutcomes,
    budget: float,
) -> tuple[Contest, ExactChoice]:
    """Return the better placement, and what just keeps the target on `select` there."""
    allowed, thorough = max(0, int(budget + 1e-9)), settings.confidence is None
    contests = [contest_of(library, settings, placement, select) for placement in placements]
    found = [(each, _solve(each, allowed, settings, thorough=thorough)) for each in contests]
    return min(found, key=lambda pair: placement_rank(pair[0].placement, pair[1].outcome.mean_latency_ms))


def _check_inputs(library: Library, settings: Settings, count: int) -> None:
    """Refuse, before the engine runs, a target that so few inputs cannot prove even without a loss."""
    needed = required_inputs(settings.accuracy, 1.0 - (settings.confidence or DEFAULT_CONFIDENCE))
    if count < needed:
        raise CompositionError(
            f"backend '{library.manifest.profile.backend}' answers differently than in float32, so "
            f"{settings.accuracy:g} must be proven even without caches: that takes {needed} inputs to "
            f"certify on, and there are {count}; explore with more --data, or use another backend"
        )


def _too_coarse(library: Library, settings: Settings, losses: int, inputs: int) -> CompositionError:
    backend = library.manifest.profile.backend
    return CompositionError(
        f"on backend '{backend}' the whole network, without any cache, answers {losses} of {inputs} inputs "
        f"differently than in float32: {settings.accuracy:g} cannot be certified there; lower --accuracy, or "
        "use another backend"
    )


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
    for objective in PUBLISHED:  # so that the result is never slower than theirs at the agreement they reach
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


def _solve(
    contest: Contest, budget: int, settings: Settings, *, thorough: bool = False, prove: bool = False
) -> ExactChoice:
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
    """Return the settings to walk through, strictest first, each faster than the one before.

    `budget` is how many disagreements are tolerated among the inputs of `instance`, `steps` are shares of it.
    `frontier` is the result of `search_frontier` with the smoothed loss, to share among budgets.
    """
    if not instance.trials:
        return []
    risky = replace(instance, loss=smoothed_loss(instance))
    frontier = frontier or search_frontier(risky)
    path: list[ExactChoice] = []
    for risk in (share * budget for share in steps) if budget > 0.0 else ():
        chosen = _without_trifles(risky, frontier.within(float(risk), thorough=False), float(risk))
        outcome = instance.outcome(chosen)
        fastest_ms = path[-1].outcome.mean_latency_ms if path else instance.base_ms
        if outcome.mean_latency_ms < fastest_ms:
            path.append(ExactChoice(chosen, outcome, 0.0, SEARCH))
    return path


def _without_trifles(instance: Instance, chosen: Chosen, budget: float) -> Chosen:
    """Drop exits that save next to nothing: each is one more cut through the network, and often luck."""
    for pair in chosen:
        fewer = tuple(other for other in chosen if other != pair)
        before, after = instance.outcome(chosen), instance.outcome(fewer)
        if (
            after.mean_latency_ms <= (1.0 + TRIFLE) * before.mean_latency_ms
            and after.disagreements <= budget + ROUNDING
        ):
            chosen = fewer
    return chosen


def candidates_of(contest: Contest, chosen: Chosen) -> tuple[Candidate, ...]:
    """Return the choice as candidates, with thresholds instead of cuts."""
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
