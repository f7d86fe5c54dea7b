"""Costs of trained lookups, for the trials table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gati.caches import load_cache
from gati.engine.cores import most_lookup_cores
from gati.exploration.library import Library
from gati.exploration.lookup_costs import lookup_costs
from gati.exploration.prepared import Prepared
from gati.exploration.progress import Progress
from gati.exploration.state import FinishedTrial
from gati.types import OperatingPoint, Trial, TrialId
from gati.variants import ITSELF


def finish_trials(
    prepared: Prepared,
    library: Library,
    finished: Mapping[TrialId, FinishedTrial],
    progress: Progress,
    notes: list[str],
    late: Callable[[], bool],
) -> list[Trial]:
    """Every row of the trials table, with the measured cost of its trained lookup, selector included.

    The network itself has none here: it could only do the same work twice, see `gati.exploration.itself`.
    `notes` gets a line for each measurement that other work on the machine disturbed. Once `late` returns
    True, the remaining rows keep the cost of the untrained lookup, and have no cost of overlapped ones.
    Neither has any row if fewer cores can be reserved for these here than on the machine of the library.
    """
    wanted, most = prepared.profile.lookup_cores, most_lookup_cores()
    cores = wanted if wanted <= most else None
    if cores is None:
        progress.note(
            f"overlapped lookups are not measured: those of the library have {wanted} cores of their own, "
            f"but at most {most} can be reserved here"
        )
    measured: dict[tuple[str, tuple[int, ...], str], tuple[float, float | None, float | None]] = {}
    specified = {item.trial.trial_id: item.trial for item in prepared.specifications}
    every = [*(row.trial for row in finished.values() if row.trial.trial_id not in specified)]
    every = sorted((*every, *specified.values()), key=lambda trial: trial.block_index)
    trained = [row.trial for row in finished.values() if row.trial.status == "trained"]
    progress.stage("measuring lookups", sum(trial.variant != ITSELF for trial in trained))
    rows, unmeasured = [], 0
    for trial in every:
        row = finished.get(trial.trial_id)
        if row is None or row.trial.status != "trained" or trial.variant == ITSELF:
            rows.append(trial if row is None else row.trial)
            continue
        key = (trial.variant, prepared.traced.hidden_shapes[trial.block], row.trial.selector)
        if key not in measured and trial.lookup_ms is not None and late():
            unmeasured += 1
            rows.append(row.trial)
            continue
        if key not in measured:
            cache = load_cache(library.cache_path(trial.trial_id)).to(prepared.device)
            measured[key] = lookup_costs(
                prepared.traced,
                trial.block,
                cache,
                prepared.profile.base_ms,
                notes,
                cores=cores,
            )
        progress.advance(1)
        lookup_ms, overlapped_ms, penalty_ms = measured[key]
        rows.append(
            replace(
                row.trial,
                lookup_ms=lookup_ms,
                overlapped_lookup_ms=overlapped_ms,
                overlapped_penalty_ms=penalty_ms,
            )
        )
    if unmeasured:
        progress.note(f"out of time: {unmeasured} lookups were only measured untrained and inline")
    return rows


def points_of(finished: Mapping[TrialId, FinishedTrial], rows: Sequence[Trial]) -> list[OperatingPoint]:
    """The operating points of all rows that were trained."""
    trained = [row.trial_id for row in rows if row.trial_id in finished]
    return [point for trial_id in trained for point in finished[trial_id].points]
