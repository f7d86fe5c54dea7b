"""Exact compositions with a certificate: a path of settings made on the select split, tested on the other.

The path is a series of compositions, each the fastest that the search finds within an increasing budget of
risk on the select split. It is fixed before anything looks at the certify split, as the walk requires; the
settings need not be nested. Choosing exits anew for each budget is better than only shifting thresholds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gati.composition.binomial import p_value, required_inputs
from gati.composition.certificate import Certificate, LossCounts
from gati.composition.contests import (
    FEW_STEPS,
    STEPS,
    Contest,
    candidates_of,
    contest_of,
    path_within,
    plan_of,
    solve_within,
    worthwhile,
)
from gati.composition.exact import SEARCH, ExactChoice
from gati.composition.outcomes import SplitOutcomes
from gati.composition.plans import (
    DEFAULT_CONFIDENCE,
    CandidatePlan,
    Settings,
    placement_rank,
)
from gati.composition.problem import Candidate
from gati.composition.refining import refined, wrong_in_between
from gati.composition.replay import Replay
from gati.composition.risk import smoothed_loss
from gati.composition.verdicts import (
    counts_of,
    replay_of,
    walk_through,
    walked_on,
    with_certificate,
)
from gati.composition.walk import certify, certify_every_class
from gati.errors import CompositionError
from gati.exploration.library import Library
from gati.types import Placement


class TooCoarseError(CompositionError):
    """An engine loses more than allowed even without exits, as counted for this certificate."""

    def __init__(self, message: str, certificate: Certificate) -> None:
        super().__init__(message)
        self.certificate = certificate


@dataclass(frozen=True)
class Proposal:
    """The path of settings to test for one engine, made on the select split alone, strictest first."""

    library: Library
    settings: Settings
    contest: Contest
    select: SplitOutcomes
    path: tuple[ExactChoice, ...]
    candidates: tuple[tuple[Candidate, ...], ...]  # of each setting of the path
    main: tuple[int, ...]  # settings that are always counted; others only if they could fail

    def hoped_ms(self, inputs: int, share: float = 1.0, *, draws: int | None = None) -> float | None:
        """The mean latency that a walk over `inputs` should reach at a share of delta, by the select split.

        The expected error rate is the larger one of two: that on the select split, where thresholds were
        chosen, and that of the risk model. Losses are expected among all `draws`, by default the `inputs`, of
        which these are evidence. None if no gain is expected.
        """
        instance, count = self.contest.instance, len(self.select)
        if not self.path or inputs == 0:
            return None
        risky = replace(instance, loss=smoothed_loss(instance)) if instance.trials else instance
        scale, losses_scale = inputs / count, (inputs if draws is None else draws) / count
        self.select.expect([self.candidates[at] for at in self.main])
        replays: list[Replay] = []

        def expected() -> Iterator[list[LossCounts]]:
            for choice, candidates in ((self.path[at], self.candidates[at]) for at in self.main):
                replays.append(replay_of(self.library, self.settings, candidates, self.select))
                risk = risky.outcome(choice.chosen).disagreements + self.select.lost_without_exits
                parts = counts_of(self.library, self.settings, replays[-1], self.select)
                unseen = max(0.0, risk - float(replays[-1].wrong.sum())) / len(parts)
                yield [
                    _expected_counts(min(lost + unseen, size), size, scale, losses_scale)
                    for lost, size in parts
                ]

        reached = certify_every_class(
            expected(), self.settings.accuracy, self._delta, share=share, settings=len(self.main)
        )
        return None if reached.deployed is None else replays[reached.deployed].mean_latency_ms

    def walk(self, certified_on: SplitOutcomes | None, share: float = 1.0) -> tuple[Certificate, int | None]:
        """Walk the path on the certify split with a share of delta. Returns also the deployed position."""
        if certified_on is None or not self.path:
            return certify([LossCounts(0, 0)], self.settings.accuracy, self._delta, share=share), None
        counted: list[int] = []
        counts = self._counts_along(certified_on, share, counted)
        certificate = walk_through(self.library, self.settings, counts, len(self.path), share)
        return certificate, None if certificate.deployed is None else counted[certificate.deployed]

    def uncounted(self, share: float = 1.0) -> Certificate:
        """Return a certificate without any count of this engine's own, to keep those of other engines."""
        nothing = certify([], self.settings.accuracy, self._delta, share=share)
        return replace(nothing, walked_on=walked_on(self.library, self.candidates))

    def _counts_along(
        self, split: SplitOutcomes, share: float, counted: list[int]
    ) -> Iterator[Sequence[LossCounts]]:
        """Yield the counts of the settings on the walk; `counted` gets the position of each on the path."""
        before: Replay | None = None
        for at in self.main:
            replay = self._replayed(at, split)
            between = range(counted[-1] + 1 if counted else 0, at)
            if before is not None and between and not self._surely_passes(before, replay, split, share):
                split.expect([self.candidates[position] for position in between])
                for position in between:
                    counted.append(position)
                    yield counts_of(self.library, self.settings, self._replayed(position, split), split)
            counted.append(at)
            yield counts_of(self.library, self.settings, replay, split)
            before = replay

    def _replayed(self, position: int, split: SplitOutcomes) -> Replay:
        return replay_of(self.library, self.settings, self.candidates[position], split)

    def _surely_passes(self, strict: Replay, loose: Replay, split: SplitOutcomes, share: float) -> bool:
        """Whether every setting between two with the same exits is certain to pass."""
        if self.settings.per_class:
            return False
        at_worst = replace(loose, wrong=wrong_in_between(strict, loose))
        parts = counts_of(self.library, self.settings, at_worst, split)
        return all(p_value(*part, self.settings.accuracy) <= share * self._delta for part in parts)

    def deploy(self, certified_on: SplitOutcomes | None, share: float = 1.0) -> CandidatePlan:
        """Return the plan for the setting at which the walk on the certify split ends.

        Raises TooCoarseError if the engine loses more than allowed even without exits.
        """
        library, settings, contest = self.library, self.settings, self.contest
        certificate, position = self.walk(certified_on, share)
        if certificate.deployed is None and self.select.coarse:
            message = _too_coarse(library, settings, certificate.losses, certificate.inputs)
            message += "; this was a use of the certify split"
            raise TooCoarseError(message, replace(certificate, walked_on=walked_on(library, self.candidates)))
        if position is None:
            nothing = ExactChoice((), contest.instance.outcome(()), 0.0, SEARCH)
            plan = plan_of(library, settings, contest, self.select, nothing)
        else:
            deployed = self.path[position]
            proven = solve_within(contest, round(deployed.outcome.disagreements), settings, prove=True)
            bound_ms = min(proven.bound_ms, deployed.outcome.mean_latency_ms)
            plan = plan_of(library, settings, contest, self.select, replace(deployed, bound_ms=bound_ms))
        if not self.path:
            return plan
        return with_certificate(library, settings, plan, certificate, certified_on, self.candidates)

    @property
    def _delta(self) -> float:
        return 1.0 - (self.settings.confidence or DEFAULT_CONFIDENCE)


def _expected_counts(lost: float, size: int, scale: float, losses_scale: float) -> LossCounts:
    """The counts to expect if `lost` of `size` are; what is evidence counts once if it is not lost."""
    losses = round(losses_scale * lost)
    return LossCounts(losses, max(losses, round(scale * size + (losses_scale - scale) * lost)))


def plan_uncertified(
    library: Library, settings: Settings, placements: Sequence[Placement], select: SplitOutcomes
) -> CandidatePlan:
    """Return the exact plan that just meets the target on `select`, for a composition without a confidence.

    Raises SolverError, and CompositionError if the engine loses more than allowed even without exits.
    """
    budget = _budget(settings, select)
    if budget < 0.0:
        raise CompositionError(_too_coarse(library, settings, select.lost_without_exits, len(select)))
    contest, target = _best_contest(library, settings, placements, select, budget)
    return plan_of(library, settings, contest, select, worthwhile(contest, target, _allowed(budget)))


def propose(
    library: Library,
    settings: Settings,
    placements: Sequence[Placement],
    select: SplitOutcomes,
    inputs: int,
) -> Proposal:
    """Return the settings to test on `inputs` of the certify split, without looking at them.

    Raises CompositionError if there are too few inputs to certify an engine of reduced precision.
    """
    if select.coarse:
        _check_inputs(library, settings, inputs)
    budget = _budget(settings, select)
    contest, target = _best_contest(library, settings, placements, select, budget)
    path = path_within(contest.instance, budget, FEW_STEPS if select.coarse else STEPS)
    main = tuple(range(len(path)))
    if select.coarse:
        path.insert(0, replace(target, chosen=(), outcome=contest.instance.outcome(())))
        path, main = refined(contest.instance, path)
    candidates = tuple(candidates_of(contest, choice.chosen) for choice in path)
    select.announce(candidates)
    return Proposal(library, settings, contest, select, tuple(path), candidates, main)


def _budget(settings: Settings, select: SplitOutcomes) -> float:
    return (1.0 - settings.accuracy) * len(select) - select.lost_without_exits


def _allowed(budget: float) -> int:
    return max(0, int(budget + 1e-9))


def _best_contest(
    library: Library,
    settings: Settings,
    placements: Sequence[Placement],
    select: SplitOutcomes,
    budget: float,
) -> tuple[Contest, ExactChoice]:
    """Return the better placement, and the composition that just meets the target on `select` there."""
    allowed, thorough = _allowed(budget), settings.confidence is None
    contests = [contest_of(library, settings, placement, select) for placement in placements]
    found = [(each, solve_within(each, allowed, settings, thorough=thorough)) for each in contests]
    return min(found, key=lambda pair: placement_rank(pair[0].placement, pair[1].outcome.mean_latency_ms))


def _check_inputs(library: Library, settings: Settings, count: int) -> None:
    """Raise, before the engine runs, if the inputs are too few to prove the target even without a loss."""
    needed = required_inputs(settings.accuracy, 1.0 - (settings.confidence or DEFAULT_CONFIDENCE))
    if count < needed:
        raise CompositionError(
            f"backend '{library.manifest.profile.backend}' answers differently than in float32, so "
            f"{settings.accuracy:g} must be proven even without caches: that needs {needed} inputs to "
            f"certify on, but there are {count}; explore with more --data, or use another backend"
        )


def _too_coarse(library: Library, settings: Settings, losses: int, inputs: int) -> str:
    backend = library.manifest.profile.backend
    return (
        f"on backend '{backend}' the whole network, without any cache, answers {losses} of {inputs} inputs "
        f"differently than in float32: {settings.accuracy:g} cannot be certified there; lower --accuracy, or "
        "use another backend"
    )
