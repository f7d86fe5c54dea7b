"""Costs of lookups: of a typical one, to plan with, and of all trained ones, for the trials table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gati.caches import LearnedCache, is_reduced, load_cache
from gati.caches.selectors import BASELINE
from gati.costs.lengths import lookup_at_lengths
from gati.costs.overlap import measure_overlap
from gati.engine.cores import most_lookup_cores
from gati.exploration.budget import Clock
from gati.exploration.candidates import Specification
from gati.exploration.library import Library
from gati.exploration.prepared import Prepared
from gati.exploration.progress import Progress
from gati.exploration.state import FinishedTrial
from gati.model.lengths import TracedSequences
from gati.model.segments import TracedModel
from gati.types import OperatingPoint, Trial, TrialId
from gati.variants import ITSELF


class MeasuredLookup(NamedTuple):
    """Milliseconds of an inline lookup, of an overlapped one, and the delay that this causes the base model.

    The last two are None if they are not measured.
    """

    inline_ms: float
    overlapped_ms: float | None = None
    penalty_ms: float | None = None


def lookup_seconds(traced: TracedModel, specifications: Sequence[Specification], clock: Clock) -> float:
    """Seconds that `explore` needs at its end to measure one lookup, measured on a typical one."""
    trained = [item for item in specifications if item.trial.status == "trained"]
    costly = [item for item in trained if not is_reduced(item.trial.variant)]
    if not costly:
        return 0.0
    item = costly[len(costly) // 2]
    cache = LearnedCache(item.trial.variant, item.hidden_shape, traced.classes, BASELINE).to(traced.device)
    began = clock()
    _costs(traced, item.trial.block, cache, base_ms=1.0, notes=None, cores=1)
    return clock() - began


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
    cores = _cores_to_measure_on(prepared.profile.lookup_cores, progress)
    every = _rows_so_far(prepared.specifications, finished)
    progress.stage("measuring lookups", sum(map(_has_costs, every)))
    measured: dict[tuple[str, tuple[int, ...], str], MeasuredLookup] = {}
    rows, unmeasured = [], 0
    for trial in every:
        if not _has_costs(trial):
            rows.append(trial)
            continue
        key = (trial.variant, prepared.traced.hidden_shapes[trial.block], trial.selector)
        if key not in measured:
            if trial.lookup_ms is not None and late():
                unmeasured += 1
                rows.append(trial)
                continue
            cache = load_cache(library.cache_path(trial.trial_id)).to(prepared.device)
            base_ms = prepared.profile.base_ms
            measured[key] = _costs(prepared.traced, trial.block, cache, base_ms, notes, cores)
        progress.advance(1)
        found = measured[key]
        rows.append(
            replace(
                trial,
                lookup_ms=found.inline_ms,
                overlapped_lookup_ms=found.overlapped_ms,
                overlapped_penalty_ms=found.penalty_ms,
            )
        )
    if unmeasured:
        progress.note(f"out of time: {unmeasured} lookups were only measured untrained and inline")
    return rows


def points_of(finished: Mapping[TrialId, FinishedTrial], rows: Sequence[Trial]) -> list[OperatingPoint]:
    """The operating points of all rows that were trained."""
    trained = [row.trial_id for row in rows if row.trial_id in finished]
    return [point for trial_id in trained for point in finished[trial_id].points]


def _has_costs(trial: Trial) -> bool:
    return trial.status == "trained" and trial.variant != ITSELF


def _rows_so_far(
    specifications: Sequence[Specification], finished: Mapping[TrialId, FinishedTrial]
) -> list[Trial]:
    """All trials in forward order of their blocks; at each, those without a specification come first."""
    specified = {item.trial.trial_id: item.trial for item in specifications}
    done = {name: row.trial for name, row in finished.items()}
    others = [trial for name, trial in done.items() if name not in specified]
    own = [done.get(name, trial) for name, trial in specified.items()]
    return sorted((*others, *own), key=lambda trial: trial.block_index)


def _cores_to_measure_on(wanted: int, progress: Progress) -> int | None:
    """The cores of overlapped lookups; None, and a note, if so many cannot be reserved here."""
    most = most_lookup_cores()
    if wanted <= most:
        return wanted
    progress.note(
        f"overlapped lookups are not measured: those of the library have {wanted} cores of their own, "
        f"but at most {most} can be reserved here"
    )
    return None


def _costs(
    traced: TracedModel,
    block: str,
    cache: LearnedCache,
    base_ms: float,
    notes: list[str] | None,
    cores: int | None,
) -> MeasuredLookup:
    """The costs of a lookup relative to its network, whose time is `base_ms`.

    Overlapped lookups have so many `cores`; None: they are not measured. For sequences of varying length, the
    inline lookup is the mean over the lengths; lookups are never overlapped.
    """
    inline_ms = lookup_at_lengths(traced, cache, lambda each: each.hidden_example(block), base_ms, notes)
    if cores is None or isinstance(traced, TracedSequences):
        return MeasuredLookup(inline_ms)
    # As in serving, the lookup's worker takes cores from the base model; the penalty includes that.
    overlap = measure_overlap(traced, block, cache, cores=cores, notes=notes)
    return MeasuredLookup(inline_ms, overlap.lookup_ms, overlap.penalty_ms)
