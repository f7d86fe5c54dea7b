"""Checks of what is asked for, before anything is measured or chosen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

from gati.composition.binomial import check_confidence
from gati.composition.candidates import has_placement
from gati.composition.composition import Objective
from gati.composition.plans import Settings
from gati.composition.solvers import check_solver
from gati.cores import MOST_THREADS
from gati.errors import BackendError, CompositionError, CutError, VariantError
from gati.exploration.library import Library, file_sha256
from gati.exploration.weights import check_same_weights
from gati.types import NAME_RULE, Placement, Trial, is_name, why_no_exits
from gati.units import format_bytes


def check_settings(settings: Settings) -> None:
    """Raise CompositionError, BackendError or SolverError for values that no library could satisfy."""
    if not 0.0 < settings.accuracy < 1.0:
        raise CompositionError(
            f"accuracy target is {settings.accuracy!r}, but must lie strictly between 0 and 1, such as 0.99"
        )
    if settings.confidence is not None:
        check_confidence(settings.confidence)
    if settings.per_class and settings.confidence is None:
        raise CompositionError("certifying every class needs a confidence, such as 0.95")
    if settings.objective not in get_args(Objective):
        choices = ", ".join(get_args(Objective))
        raise CompositionError(f"unknown objective {settings.objective!r}; choose one of: {choices}")
    if settings.placement not in ("auto", *get_args(Placement)):
        choices = ", ".join(("auto", *get_args(Placement)))
        raise BackendError(f"unknown placement {settings.placement!r}; choose one of: {choices}")
    if not is_name(settings.name):
        raise CompositionError(
            f"{settings.name!r} cannot be the name of a composition; use {NAME_RULE}, such as 'fast'"
        )
    if settings.slowdown is not None and settings.slowdown != "auto" and not settings.slowdown >= 0.0:
        raise CompositionError(
            f"slowdown is {settings.slowdown!r}, but must be 0 or more, such as 0.08 for 8 % of the base "
            "model's time"
        )
    if isinstance(settings.threads, int) and not 1 <= settings.threads <= MOST_THREADS:
        raise BackendError(f"threads is {settings.threads}; give 1 to {MOST_THREADS}, or auto")
    check_solver(settings.solver)


def check_library(library: Library, settings: Settings) -> None:
    """Raise, before anything is measured, for what this library cannot satisfy.

    CompositionError for a memory limit below the smallest cache, and for the exact objective without
    per-input outcomes; BackendError for overlapped lookups where they would not be measured; CutError for a
    library of an older Gati with blocks that no engine takes; VariantError for caches of a family that is not
    registered here, which could not be loaded.
    """
    if reason := why_no_exits(block.name for block in library.manifest.blocks):
        raise CutError(reason)
    check_memory(library.trials, settings.memory_limit_bytes)
    _check_families(library.trials)
    if settings.objective == "exact" and not library.has_outcomes:
        raise CompositionError(
            "objective 'exact' needs the per-input outcomes, which this library does not have (outcomes/); "
            "use --objective full, or explore again"
        )
    if settings.placement == "overlapped":
        placements(library, settings)
        profile = library.manifest.profile
        if settings.backend not in ("auto", profile.backend):
            raise _not_measured("overlapped", f"on backend '{settings.backend}'")
        if settings.threads not in (None, profile.threads):
            raise _not_measured("overlapped", f"with threads={settings.threads}")


def _check_families(trials: tuple[Trial, ...]) -> None:
    from gati.caches import is_companion, parse_variant  # import torch

    variants = {trial.variant for trial in trials if trial.status == "trained"}
    for variant in sorted(variants):
        try:
            if not is_companion(variant):
                parse_variant(variant)
        except VariantError as error:
            raise VariantError(
                f"the library has caches {variant}, a family that is not registered here, so they cannot be "
                "loaded: compose in a program that registers it with gati.caches.register_predictor"
            ) from error


def check_checkpoint(library: Library) -> None:
    """Raise LibraryError if the checkpoint's file has changed since explore: later verbs would refuse it.

    One that is not there, or that this user may not read, is passed over: composing alone does not need it.
    """
    path = library.manifest.checkpoint_path
    if path is not None and os.path.isfile(path) and os.access(path, os.R_OK):
        check_same_weights(library, file_sha256(Path(path)))


def check_memory(trials: tuple[Trial, ...], limit_bytes: int | None) -> None:
    """Raise CompositionError for a memory limit below the smallest cache."""
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

    Raises BackendError for a requested placement that was not measured.
    """
    every: tuple[Placement, ...] = get_args(Placement)
    measured = [each for each in every if has_placement(library.trials, each)]
    if settings.placement == "auto":
        return measured or ["inline"]
    trained = any(trial.status == "trained" for trial in library.trials)
    if trained and settings.placement not in measured:
        backend = library.manifest.profile.backend
        where = f"on backend '{backend}' (measured: {', '.join(measured) or 'none'})"
        raise _not_measured(settings.placement, where)
    return [settings.placement]


def _not_measured(placement: Placement, where: str) -> BackendError:
    return BackendError(
        f"placement {placement!r} was not measured {where}: gati explore does that on its own backend and "
        "number of threads, where cores are left; use placement auto"
    )
