"""`gati compose`: choose which learned caches serve together, and say what to expect of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from gati.compose.candidates import (
    full_candidates,
    has_placement,
    reach_by_block,
    relaxed_candidates,
)
from gati.compose.composition import Composition, Exit, Expected, Objective
from gati.compose.full import solve_full
from gati.compose.outcomes import SplitOutcomes
from gati.compose.problem import Candidate, Choice, Estimate, Problem, estimate
from gati.compose.relaxed import sweep_relaxed
from gati.compose.replay import Replay
from gati.compose.solvers import check_solver
from gati.errors import BackendError, CompositionError
from gati.explore.library import SELECT, Library
from gati.types import Placement, Trial
from gati.units import format_bytes, parse_bytes

__all__ = ["Settings", "compose", "compose_library"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Settings:
    """What the operator asks of a composition."""

    accuracy: float = 0.99
    confidence: float | None = 0.95
    memory_limit_bytes: int | None = None
    objective: Objective = "full"
    solver: str = "auto"
    placement: Placement | Literal["auto"] = "auto"
    backend: str = "auto"
    name: str = "default"


@dataclass(frozen=True)
class Plan:
    """One candidate answer: what was chosen under one placement, and what to expect of it."""

    placement: Placement
    choice: Choice
    exits: tuple[Exit, ...]
    expected: Expected
    replayed: bool


def compose(
    directory: str | Path,
    *,
    accuracy: float = 0.99,
    confidence: float | None = 0.95,
    memory_bytes: int | str | None = None,
    objective: Objective = "full",
    solver: str = "auto",
    placement: Placement | Literal["auto"] = "auto",
    backend: str = "auto",
    name: str = "default",
) -> Composition:
    """Choose caches from the library in `directory`, write the composition there, and return it.

    `accuracy` is the wanted agreement with the base model; `memory_bytes` limits the caches' weights and may
    be written like `"256MiB"`; `placement` "auto" takes the better of those that were measured. Needs the
    tables of the library only; where per-input outcomes are there too, expectations are replayed on them.

    Raises CompositionError for impossible limits, SolverError, BackendError, LibraryError.
    """
    settings = Settings(
        accuracy=accuracy,
        confidence=confidence,
        memory_limit_bytes=None if memory_bytes is None else parse_bytes(memory_bytes),
        objective=objective,
        solver=solver,
        placement=placement,
        backend=backend,
        name=name,
    )
    check_settings(settings)
    library = Library.open(directory)
    composition = compose_library(library, settings)
    composition.save(library.composition_path(name))
    return composition


def compose_library(
    library: Library, settings: Settings, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> Composition:
    """Choose caches from an open library; nothing is written. Raises as `compose`."""
    check_settings(settings)
    check_backend(library, settings)
    check_memory(library.trials, settings.memory_limit_bytes)
    select = SplitOutcomes(library, SELECT) if library.has_outcomes else None
    if select is not None and len(select) == 0:
        select = None
    plans = [plan_placement(library, settings, each, select) for each in placements(library, settings)]
    best = min(plans, key=lambda plan: (plan.expected.mean_latency_ms, plan.placement != "inline"))
    return Composition(
        name=settings.name,
        objective=settings.objective,
        solver=best.choice.solver,
        gap=best.choice.gap,
        alpha=best.choice.alpha,
        accuracy_target=settings.accuracy,
        confidence=settings.confidence,
        memory_limit_bytes=settings.memory_limit_bytes,
        backend=library.manifest.profile.backend,
        placement=best.placement,
        exits=best.exits,
        expected=best.expected,
        certificate=None,
        checkpoint_sha256=library.manifest.checkpoint_sha256,
        created=clock().isoformat(timespec="seconds"),
        note=_note(library, settings, best),
        expected_from="replay" if best.replayed else "table",
    )


def check_settings(settings: Settings) -> None:
    """Refuse values that no library could satisfy. Raises CompositionError or SolverError."""
    if not 0.0 < settings.accuracy < 1.0:
        raise CompositionError(
            f"accuracy target is {settings.accuracy!r}, must lie strictly between 0 and 1, for example 0.99"
        )
    if settings.confidence is not None and not 0.0 < settings.confidence < 1.0:
        raise CompositionError(
            f"confidence is {settings.confidence!r}, must lie strictly between 0 and 1, for example 0.95"
        )
    if settings.objective not in get_args(Objective):
        choices = ", ".join(get_args(Objective))
        raise CompositionError(f"unknown objective {settings.objective!r}; choose one of: {choices}")
    if settings.placement not in ("auto", *get_args(Placement)):
        choices = ", ".join(("auto", *get_args(Placement)))
        raise BackendError(f"unknown placement {settings.placement!r}; choose one of: {choices}")
    if not NAME.fullmatch(settings.name):
        raise CompositionError(
            f"composition name {settings.name!r} must be letters, digits, '.', '_' or '-', for example 'fast'"
        )
    check_solver(settings.solver)


def check_backend(library: Library, settings: Settings) -> None:
    """Refuse a backend whose latencies the library does not hold. Raises BackendError."""
    measured = library.manifest.profile.backend
    if settings.backend not in ("auto", measured):
        raise BackendError(
            f"backend {settings.backend!r}: this library's latencies were measured on {measured!r} only; "
            f"use --backend {measured}, or auto"
        )


def check_memory(trials: tuple[Trial, ...], limit_bytes: int | None) -> None:
    """Refuse a memory limit below the smallest cache. Raises CompositionError."""
    sizes = [(trial.memory_bytes, trial.trial_id) for trial in trials if trial.status == "trained"]
    if limit_bytes is None or not sizes or limit_bytes >= min(sizes)[0]:
        return
    smallest, trial_id = min(sizes)
    raise CompositionError(
        f"memory limit {limit_bytes} bytes is too small for any cache: the smallest, {trial_id}, needs "
        f"{smallest} bytes ({format_bytes(smallest)}); allow at least that"
    )


def placements(library: Library, settings: Settings) -> list[Placement]:
    """Return the placements to compose for: the wanted one, or for "auto" every one that was measured.

    Raises BackendError for a placement that was asked for and not measured.
    """
    every: tuple[Placement, ...] = get_args(Placement)
    measured = [each for each in every if has_placement(library.trials, each)]
    if settings.placement == "auto":
        return measured or ["inline"]
    trained = any(trial.status == "trained" for trial in library.trials)
    if trained and settings.placement not in measured:
        raise BackendError(
            f"placement {settings.placement!r} was not measured in this library (measured: "
            f"{', '.join(measured) or 'none'}); explore again on a device that has it, or use auto"
        )
    return [settings.placement]


def plan_placement(
    library: Library, settings: Settings, placement: Placement, select: SplitOutcomes | None
) -> Plan:
    """Solve one of the published forms for one placement."""
    make = relaxed_candidates if settings.objective == "relaxed" else full_candidates
    candidates = make(library.trials, library.operating_points, placement, settings.accuracy)
    limit = settings.memory_limit_bytes
    problem = Problem(
        reach_ms=reach_by_block(library.manifest.blocks),
        base_ms=library.manifest.profile.base_ms,
        candidates=tuple(c for c in candidates if limit is None or c.memory_bytes <= limit),
        accuracy=settings.accuracy,
        memory_limit_bytes=limit,
        one_lookup_at_a_time=True,  # as published, for either placement
    )

    def expect(chosen: tuple[Candidate, ...]) -> Estimate | Replay:
        return estimate(problem, chosen) if select is None else select.replay(problem, chosen)

    if settings.objective == "relaxed":
        choice = sweep_relaxed(problem, solver=settings.solver, expect=expect)
    else:
        choice = solve_full(problem, solver=settings.solver)
        if expect(choice.candidates).mean_latency_ms >= problem.base_ms:
            choice = Choice((), problem.base_ms, choice.gap, choice.solver)
    return describe(library, problem, placement, choice, select)


def describe(
    library: Library, problem: Problem, placement: Placement, choice: Choice, select: SplitOutcomes | None
) -> Plan:
    """Return the plan for a choice: each exit and the whole, replayed where outcomes are there."""
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
    return Plan(placement, choice, exits, expected, replayed=select is not None)


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
    )


def _note(library: Library, settings: Settings, plan: Plan) -> str:
    if not any(trial.status == "trained" for trial in library.trials):
        return "no caches: the library holds no trained variant; see the reasons in trials.csv"
    if not plan.exits:
        return (
            f"no caches: none both reaches agreement {settings.accuracy:g} and saves time within the limits; "
            "lower --accuracy, raise --memory, or explore longer"
        )
    if plan.expected.agreement < settings.accuracy:
        return (
            f"replayed input by input, agreement is {plan.expected.agreement:.4f}, below the target "
            f"{settings.accuracy:g}: the published form counts averages; use the exact objective"
        )
    return ""
