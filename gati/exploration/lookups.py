"""Costs of trained lookups, for the trials table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from gati.caches import load_cache
from gati.engine.cores import most_lookup_cores
from gati.exploration.library import Library
from gati.exploration.lookup_costs import lookup_costs
from gati.exploration.network import load_network
from gati.exploration.prepared import Prepared
from gati.exploration.progress import Progress
from gati.exploration.state import FinishedTrial
from gati.model.segments import TracedModel
from gati.types import OperatingPoint, Profile, Trial, TrialId
from gati.variants import ITSELF

LOOKUP_CORES = "lookup_cores"  # the setting of an exploration, if it is not 1


def finish_trials(
    prepared: Prepared,
    library: Library,
    finished: Mapping[TrialId, FinishedTrial],
    progress: Progress,
    notes: list[str],
    late: Callable[[], bool],
) -> list[Trial]:
    """Every row of the trials table, with the measured cost of its trained lookup, selector included.

    `notes` gets a line for each measurement that other work on the machine disturbed. Once `late` returns
    True, the remaining rows keep the cost of the untrained lookup, and have no cost of overlapped ones.
    Neither has any row if fewer cores can be reserved for these here than on the machine of the library.
    """
    rows = {item.trial.trial_id: item.trial for item in prepared.specifications}
    others = [row.trial for name, row in finished.items() if name not in rows]
    rows |= {name: row.trial for name, row in finished.items() if name in rows}
    every = sorted((*others, *rows.values()), key=lambda trial: trial.block_index)
    return _measured(every, library, prepared.traced, prepared.profile, progress, notes, late)


def measure_again(library: Library, lookup_cores: int, device: torch.device, progress: Progress) -> None:
    """Measure all lookups of a finished library again; overlapped ones now have so many cores.

    Caches do not change, so compositions of them stay as they are.

    **Raises:** `LibraryError` if the network has changed; and as `load_network`.
    """
    progress.note(f"measuring lookups again; overlapped ones now have {lookup_cores} cores of their own")
    manifest, notes = library.manifest, list[str]()
    profile = replace(manifest.profile, lookup_cores=lookup_cores)
    traced = load_network(library, device).traced
    rows = _measured(library.trials, library, traced, profile, progress, notes, lambda: False)
    library.write_trials(rows, list(library.operating_points))
    settings = {name: value for name, value in manifest.settings.items() if name != LOOKUP_CORES}
    if lookup_cores != 1:
        settings[LOOKUP_CORES] = lookup_cores
    library.write_manifest(replace(manifest, profile=disturbed(profile, notes), settings=settings))


def disturbed(profile: Profile, notes: Sequence[str]) -> Profile:
    """The profile with what disturbed lookups, if nothing has disturbed its own measurement."""
    told = profile.disturbance or (f"{len(notes)} lookups: {notes[0]}" if notes else "")
    return replace(profile, disturbance=told)


def _measured(
    trials: Sequence[Trial],
    library: Library,
    traced: TracedModel,
    profile: Profile,
    progress: Progress,
    notes: list[str],
    late: Callable[[], bool],
) -> list[Trial]:
    """The trials, with the costs of those that are trained.

    The network itself has none here: it could only do the same work twice, see `gati.exploration.itself`.
    """
    wanted, most = profile.lookup_cores, most_lookup_cores()
    cores = wanted if wanted <= most else None
    if cores is None:
        progress.note(
            f"overlapped lookups are not measured: those of the library have {wanted} cores of their own, "
            f"but at most {most} can be reserved here"
        )
    measured: dict[tuple[str, tuple[int, ...], str], tuple[float, float | None, float | None]] = {}
    trained = [trial for trial in trials if trial.status == "trained" and trial.variant != ITSELF]
    progress.stage("measuring lookups", len(trained))
    costs: dict[TrialId, tuple[float, float | None, float | None]] = {}
    for trial in trained:
        key = (trial.variant, traced.hidden_shapes[trial.block], trial.selector)
        if key not in measured:
            if trial.lookup_ms is not None and late():
                continue
            cache = load_cache(library.cache_path(trial.trial_id)).to(traced.device)
            measured[key] = lookup_costs(traced, trial.block, cache, profile.base_ms, notes, cores=cores)
        costs[trial.trial_id] = measured[key]
        progress.advance(1)
    if len(costs) < len(trained):
        unmeasured = len(trained) - len(costs)
        progress.note(f"out of time: {unmeasured} lookups were only measured untrained and inline")
    return [_with_costs(trial, costs.get(trial.trial_id)) for trial in trials]


def _with_costs(trial: Trial, costs: tuple[float, float | None, float | None] | None) -> Trial:
    if costs is None:
        return trial
    lookup_ms, overlapped_ms, penalty_ms = costs
    return replace(
        trial, lookup_ms=lookup_ms, overlapped_lookup_ms=overlapped_ms, overlapped_penalty_ms=penalty_ms
    )


def points_of(finished: Mapping[TrialId, FinishedTrial], rows: Sequence[Trial]) -> list[OperatingPoint]:
    """The operating points of all rows that were trained."""
    trained = [row.trial_id for row in rows if row.trial_id in finished]
    return [point for trial_id in trained for point in finished[trial_id].points]
