"""The trade-off between latency, certified agreement and memory, for an operator to choose from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gati.composition.backends import choose_backend
from gati.composition.binomial import agreement_lower_bound
from gati.composition.certificate import LossCounts
from gati.composition.compose import keep_graphs, to_composition, written
from gati.composition.composition import Composition
from gati.composition.contests import Contest, candidates_of, contest_of, plan_of, worthwhile
from gati.composition.exact import ExactChoice, solve_exact
from gati.composition.ledger import Ledger, split_identity
from gati.composition.outcomes import SplitOutcomes, outcomes_of
from gati.composition.pieces import Pieces
from gati.composition.plans import Settings, placement_rank
from gati.composition.preconditions import check_checkpoint, check_library, check_settings, placements
from gati.composition.threads import using_threads, wanted_threads
from gati.composition.verdicts import certify_one, count_losses, replay_of, with_certificate
from gati.documents import DocumentKind, values_of
from gati.errors import CompositionError, LibraryError
from gati.exploration.library import CERTIFY, SELECT, Library

_KIND = DocumentKind(1, LibraryError, "run gati compose --pareto again")
LARGEST_SHARE = 0.15  # of inputs answered differently; no one would deploy more


@dataclass(frozen=True, kw_only=True)
class ParetoPoint:
    """One composition of the frontier; the certified agreements of all points hold jointly."""

    mean_latency_ms: float  # on the select split
    gain: float
    agreement: float  # on the select split
    certified_agreement: float  # lower confidence limit from the certify split
    confidence: float
    memory_bytes: int
    blocks: tuple[int, ...]  # where its exits are
    trials: tuple[str, ...]
    thresholds: tuple[float, ...]
    per_class: bool = False  # whether that limit is of every class
    use: int = 1  # number of this use of the library's certify split


@dataclass(frozen=True, kw_only=True)
class _Frontier:
    placement: str
    points: tuple[ParetoPoint, ...]


def pareto(
    directory: str | Path, settings: Settings | None = None, *, points: int = 16
) -> tuple[ParetoPoint, ...]:
    """Return up to `points` compositions from the highest agreement to the fastest; write `pareto.json`.

    Each is the fastest one found for its number of disagreements on the select split, without exits that save
    too little to be used, and faster than all before it. The operator sees all of them before choosing, so
    each limit gets an equal share of delta (Bonferroni). With `settings.per_class` the limits are those of
    the worst class. The ledger counts one use of the split. Raises as `compose`.
    """
    if points < 1:
        raise CompositionError(f"points is {points}; give at least 1")
    with _opened(directory, settings or Settings()) as (library, settings, select, certified_on):
        contest = _best_contest(library, settings, select)
        chosen = frontier_of(contest, select, points)
        found = count_frontier(library, settings, contest, chosen, select, certified_on)
        use = _enter_use(library, settings, found, certified_on)
        frontier = tuple(replace(point, use=use) for point, _ in found)
        kept = _Frontier(placement=contest.placement, points=frontier)
        _KIND.write(library.directory / "pareto.json", values_of(kept))
        return frontier


def read_frontier(path: Path) -> tuple[ParetoPoint, ...]:
    """Read what `pareto` wrote. Raises LibraryError."""
    return _KIND.record(_Frontier, _KIND.read(path), str(path)).points


def frontier_of(contest: Contest, select: SplitOutcomes, points: int) -> list[ExactChoice]:
    """Return the compositions of the frontier, from the select split alone."""
    largest = LARGEST_SHARE * len(select)
    budgets = sorted({round(float(b)) for b in np.geomspace(1.0, max(1.0, largest), points - 1)} | {0})
    chosen: list[ExactChoice] = []
    for budget in budgets:
        choice = _fastest_within(contest, budget)
        fastest_ms = chosen[-1].outcome.mean_latency_ms if chosen else math.inf
        if choice.chosen and choice.outcome.mean_latency_ms < fastest_ms:
            chosen.append(choice)
    return chosen


def count_frontier(
    library: Library,
    settings: Settings,
    contest: Contest,
    chosen: Sequence[ExactChoice],
    select: SplitOutcomes,
    certified_on: SplitOutcomes,
) -> list[tuple[ParetoPoint, tuple[LossCounts, ...]]]:
    """Return the points, each with its counts; each limit gets an equal share of delta."""
    share = 1.0 / max(1, len(chosen))
    for split in (select, certified_on):
        split.expect([candidates_of(contest, choice.chosen) for choice in chosen])
    return [_point(library, settings, contest, select, certified_on, choice, share) for choice in chosen]


def _point(
    library: Library,
    settings: Settings,
    contest: Contest,
    select: SplitOutcomes,
    certified_on: SplitOutcomes,
    choice: ExactChoice,
    share: float,
) -> tuple[ParetoPoint, tuple[LossCounts, ...]]:
    candidates = candidates_of(contest, choice.chosen)
    counts = count_losses(library, settings, candidates, certified_on)
    point = ParetoPoint(
        mean_latency_ms=choice.outcome.mean_latency_ms,
        gain=contest.instance.base_ms / choice.outcome.mean_latency_ms,
        # an engine of reduced precision also loses inputs that leave at no exit
        agreement=replay_of(library, settings, candidates, select).agreement,
        certified_agreement=_limit(counts, share * (1.0 - _confidence(settings))),
        confidence=_confidence(settings),
        memory_bytes=sum(candidate.memory_bytes for candidate in candidates),
        blocks=tuple(candidate.block_index for candidate in candidates),
        trials=tuple(candidate.trial_id for candidate in candidates),
        thresholds=tuple(candidate.threshold for candidate in candidates),
        per_class=settings.per_class,
    )
    return point, counts


def _limit(counts: Sequence[LossCounts], level: float) -> float:
    """The agreement proven for all inputs, or, with one pair for each class, for the worst class."""
    return min(agreement_lower_bound(losses, inputs, level) for losses, inputs in counts)


def _confidence(settings: Settings) -> float:
    if settings.confidence is None:
        raise CompositionError(
            "--pareto and --latency certify their results, which needs a confidence, such as 0.95; to "
            "compose without one, give --accuracy"
        )
    return settings.confidence


def _enter_use(
    library: Library,
    settings: Settings,
    found: Sequence[tuple[ParetoPoint, tuple[LossCounts, ...]]],
    certified_on: SplitOutcomes,
) -> int:
    if not found or not len(certified_on):
        return 0
    look = {
        "delta": 1.0 - _confidence(settings),
        "per_class": settings.per_class,
        "backend": library.manifest.profile.backend,
        "points": [[list(point.trials), list(point.thresholds)] for point, _ in found],
    }
    verdict = {"counted": [[list(pair) for pair in counts] for _, counts in found]}
    return Ledger(library.directory).use(split_identity(library), "pareto", look, verdict)


def compose_within_latency(
    directory: str | Path, latency_ms: float, settings: Settings | None = None
) -> Composition:
    """Write and return the composition of highest agreement whose mean latency is at most `latency_ms`.

    It is chosen on the select split alone, so its certified agreement needs no correction. That agreement
    becomes the composition's accuracy target, for every class with `settings.per_class`. Raises
    CompositionError if no composition is that fast or nothing can be certified, else as `compose`.
    """
    with _opened(directory, settings or Settings()) as (library, settings, select, certified_on):
        return _within_latency(library, settings, select, certified_on, latency_ms)


def _within_latency(
    library: Library,
    settings: Settings,
    select: SplitOutcomes,
    certified_on: SplitOutcomes,
    latency_ms: float,
) -> Composition:
    contest = _best_contest(library, settings, select)
    choice = _highest_agreement(contest, latency_ms, len(select))
    candidates = candidates_of(contest, choice.chosen)
    counts = count_losses(library, settings, candidates, certified_on)
    limit = math.floor(_limit(counts, 1.0 - _confidence(settings)) * 1e4) / 1e4
    if not 0.0 < limit < 1.0:
        fewest = min(inputs for _, inputs in counts)
        raise CompositionError(
            f"nothing can be certified about agreement from {fewest} inputs"
            f"{' of a class' if settings.per_class else ''}; explore with more data"
        )
    asked = replace(settings, accuracy=limit)
    plan = plan_of(library, asked, contest, select, choice)
    verdict = certify_one(library, asked, counts)
    plan = with_certificate(library, asked, plan, verdict, certified_on, [candidates])
    composition = to_composition(library, asked, plan)
    composition = keep_graphs(library, composition)
    return written(library, "latency", composition)


def _fastest_within(contest: Contest, budget: int) -> ExactChoice:
    choice = solve_exact(contest.instance, budget, frontier=contest.frontier, prove=False)
    return worthwhile(contest, choice, budget)


def _highest_agreement(contest: Contest, latency_ms: float, inputs: int) -> ExactChoice:
    """The composition of fewest disagreements within a latency that the search finds.

    Exits that save little are dropped at the end only: without them, more disagreements may take longer.
    """
    instance, frontier = contest.instance, contest.frontier
    budget = inputs if latency_ms < instance.base_ms else 0
    best = solve_exact(instance, budget, frontier=frontier, prove=False)
    if best.outcome.mean_latency_ms > latency_ms:
        raise CompositionError(
            f"no composition has a mean latency of {latency_ms:g} ms: the fastest, at any agreement, has "
            f"{best.outcome.mean_latency_ms:.4g} ms; the base model {instance.base_ms:.4g} ms"
        )
    failed = -1  # the largest budget within which nothing was fast enough
    while (fewest := round(best.outcome.disagreements)) > failed + 1:
        budget = (failed + fewest) // 2
        choice = solve_exact(instance, budget, frontier=frontier, prove=False)
        if choice.outcome.mean_latency_ms <= latency_ms:
            best = choice
        else:
            failed = budget
    for chosen in sorted(frontier.found):  # a search for one budget may find what another missed
        outcome = instance.outcome(chosen)
        if outcome.mean_latency_ms <= latency_ms and outcome.disagreements < best.outcome.disagreements:
            best = replace(best, chosen=chosen, outcome=outcome)
    return worthwhile(contest, best, best.outcome.disagreements, latency_ms)


def _best_contest(library: Library, settings: Settings, select: SplitOutcomes) -> Contest:
    budget = int((1.0 - settings.accuracy) * len(select))
    contests = [contest_of(library, settings, each, select) for each in placements(library, settings)]

    def rank(contest: Contest) -> tuple[float, bool]:
        choice = solve_exact(contest.instance, budget, frontier=contest.frontier, thorough=False, prove=False)
        return placement_rank(contest.placement, choice.outcome.mean_latency_ms)

    return min(contests, key=rank)


@contextmanager
def _opened(
    directory: str | Path, settings: Settings
) -> Iterator[tuple[Library, Settings, SplitOutcomes, SplitOutcomes]]:
    """The library on the wanted engine, with the wanted number of threads, and the outcomes of its splits."""
    check_settings(settings)
    _confidence(settings)
    opened = Library.open(directory)
    if not opened.has_outcomes:
        raise CompositionError(
            "the frontier needs the per-input outcomes, which this library lacks (outcomes/); explore again"
        )
    check_library(opened, settings)
    check_checkpoint(opened)
    pieces = Pieces(opened)
    with using_threads(wanted_threads(opened, settings, pieces)):
        library = choose_backend(opened, settings, None, pieces)
        yield library, settings, outcomes_of(library, SELECT), outcomes_of(library, CERTIFY)
