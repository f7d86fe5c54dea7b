"""The frontier of latency, certified agreement and memory, for an operator who chooses by looking."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from gati.compose.backends import choose_backend
from gati.compose.certificate import agreement_lower_bound, certify
from gati.compose.certified import (
    Contest,
    candidates_of,
    contest_of,
    count_losses,
    plan_of,
    with_certificate,
)
from gati.compose.compose import check_memory, check_settings, placements, to_composition
from gati.compose.composition import Composition
from gati.compose.exact import ExactChoice, solve_exact
from gati.compose.outcomes import SplitOutcomes, outcomes_of
from gati.compose.plans import Settings, placement_rank
from gati.errors import CompositionError
from gati.explore.library import CERTIFY, SELECT, Library
from gati.files import atomic_write_text

__all__ = ["ParetoPoint", "compose_within_latency", "pareto"]

LARGEST_SHARE = 0.15  # of inputs answered differently: what nobody would deploy


@dataclass(frozen=True)
class ParetoPoint:
    """One composition of the frontier; the certified agreements of all points hold together."""

    mean_latency_ms: float  # on the select split
    gain: float
    agreement: float  # on the select split
    certified_agreement: float  # lower confidence limit from the certify split
    confidence: float
    memory_bytes: int
    blocks: tuple[int, ...]  # where its exits are
    trials: tuple[str, ...]
    thresholds: tuple[float, ...]


def pareto(
    directory: str | Path, settings: Settings | None = None, *, points: int = 16
) -> tuple[ParetoPoint, ...]:
    """Return up to `points` compositions from the most careful to the fastest, and write `pareto.json`.

    Each is the fastest found for its number of disagreements on the select split, and faster than all before
    it. As the operator looks at all before choosing, each limit takes a share delta / points (Bonferroni).
    Raises as `compose`.
    """
    library, settings, select, certified_on = _open(directory, settings or Settings())
    contest = _best_contest(library, settings, select)
    delta = (1.0 - (settings.confidence or 0.95)) / points
    largest = LARGEST_SHARE * len(select)
    budgets = sorted({round(float(b)) for b in np.geomspace(1.0, max(1.0, largest), points - 1)} | {0})
    frontier: list[ParetoPoint] = []
    for budget in budgets:
        choice = solve_exact(contest.instance, budget, frontier=contest.frontier, prove=False)
        if choice.chosen and (not frontier or choice.outcome.mean_latency_ms < frontier[-1].mean_latency_ms):
            candidates = candidates_of(contest, choice.chosen)
            losses, inputs = count_losses(library, settings, candidates, certified_on)
            point = ParetoPoint(
                mean_latency_ms=choice.outcome.mean_latency_ms,
                gain=contest.instance.base_ms / choice.outcome.mean_latency_ms,
                agreement=1.0 - choice.outcome.disagreements / len(select),
                certified_agreement=agreement_lower_bound(losses, inputs, delta),
                confidence=settings.confidence or 0.95,
                memory_bytes=sum(candidate.memory_bytes for candidate in candidates),
                blocks=tuple(candidate.block_index for candidate in candidates),
                trials=tuple(candidate.trial_id for candidate in candidates),
                thresholds=tuple(candidate.threshold for candidate in candidates),
            )
            frontier.append(point)
    document = {"format": 1, "placement": contest.placement, "points": [asdict(point) for point in frontier]}
    atomic_write_text(
        library.directory / "pareto.json", json.dumps(document, indent=2, allow_nan=False) + "\n"
    )
    return tuple(frontier)


def compose_within_latency(
    directory: str | Path, latency_ms: float, settings: Settings | None = None
) -> Composition:
    """Return, and write, the most careful composition whose mean latency is at most `latency_ms`.

    It is chosen on the select split alone, so the agreement certified for it needs no correction; that
    becomes the composition's accuracy target. Raises CompositionError when nothing is that fast or
    nothing can be certified, else as `compose`.
    """
    library, settings, select, certified_on = _open(directory, settings or Settings())
    contest = _best_contest(library, settings, select)
    choice = _most_careful(contest, latency_ms, len(select))
    counts = count_losses(library, settings, candidates_of(contest, choice.chosen), certified_on)
    delta = 1.0 - (settings.confidence or 0.95)
    limit = math.floor(agreement_lower_bound(*counts, delta) * 1e4) / 1e4
    if not 0.0 < limit < 1.0:
        raise CompositionError(
            f"nothing can be certified about agreement from {counts[1]} inputs; explore with more data"
        )
    asked = replace(settings, accuracy=limit)
    plan = plan_of(library, asked, contest, select, choice)
    plan = with_certificate(library, asked, plan, certify([counts], limit, delta), certified_on)
    composition = to_composition(library, asked, plan, datetime.now(UTC))
    composition.save(library.composition_path(settings.name))
    return composition


def _most_careful(contest: Contest, latency_ms: float, inputs: int) -> ExactChoice:
    def solve(budget: int) -> ExactChoice:
        return solve_exact(contest.instance, budget, frontier=contest.frontier, prove=False)

    if latency_ms >= contest.instance.base_ms:
        return solve(0)
    low, high = -1, inputs
    best = solve(high)
    if best.outcome.mean_latency_ms > latency_ms:
        raise CompositionError(
            f"no composition has a mean latency of {latency_ms:g} ms: the fastest, at any agreement, has "
            f"{best.outcome.mean_latency_ms:.4g} ms; the base model {contest.instance.base_ms:.4g} ms"
        )
    while high - low > 1:
        middle = (low + high) // 2
        choice = solve(middle)
        if choice.outcome.mean_latency_ms <= latency_ms:
            high, best = middle, choice
        else:
            low = middle
    return best


def _best_contest(library: Library, settings: Settings, select: SplitOutcomes) -> Contest:
    budget = int((1.0 - settings.accuracy) * len(select))
    contests = [contest_of(library, settings, each, select) for each in placements(library, settings)]

    def rank(contest: Contest) -> tuple[float, bool]:
        choice = solve_exact(contest.instance, budget, frontier=contest.frontier, thorough=False, prove=False)
        return placement_rank(contest.placement, choice.outcome.mean_latency_ms)

    return min(contests, key=rank)


def _open(
    directory: str | Path, settings: Settings
) -> tuple[Library, Settings, SplitOutcomes, SplitOutcomes]:
    check_settings(settings)
    library = choose_backend(Library.open(directory), settings)
    check_memory(library.trials, settings.memory_limit_bytes)
    if not library.has_outcomes:
        raise CompositionError(
            "the frontier needs the per-input outcomes, which this library lacks (outcomes/); explore again"
        )
    return library, settings, outcomes_of(library, SELECT), outcomes_of(library, CERTIFY)
