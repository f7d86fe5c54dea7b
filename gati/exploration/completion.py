"""The end of an exploration: lookups are measured, and tables and manifest are written."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from gati.errors import ModelError
from gati.exploration.budget import Budget
from gati.exploration.candidates import trial_name
from gati.exploration.claims import check_nothing_depends_on
from gati.exploration.feasible import nothing_trained
from gati.exploration.learned import told_if_nothing, usual_answer
from gati.exploration.library import Library, Manifest
from gati.exploration.lookups import finish_trials, points_of
from gati.exploration.prepared import PreparedModel
from gati.exploration.progress import Progress
from gati.exploration.state import FinishedTrial, RunState
from gati.model.entry import INPUT
from gati.types import TrialId
from gati.version import __version__


def complete(
    prepared: PreparedModel,
    library: Library,
    state: RunState,
    budget: Budget,
    *,
    companions: Sequence[str],
    settings: dict[str, Any],
    seed: int,
    progress: Progress,
) -> None:
    """Make a library of what `state` has finished, and remove `state`. The variants `companions` come first.

    **Raises:** `ModelError` or `DataError` if nothing was trained; `LibraryError` if compositions use what it
    replaces.
    """
    found = state.finished()
    first = [trial_name(INPUT, variant) for variant in companions]  # rows keep the order of these
    finished = {name: found[name] for name in (*first, *found) if name in found}
    _check_something_trained(finished, budget, state)
    notes: list[str] = []
    late = partial(budget.is_spent, prepared.expected.lookup_s)
    rows = finish_trials(prepared, library, finished, progress, notes, late)
    library.write_trials(rows, points_of(finished, rows))
    check_nothing_depends_on(library)
    library.write_manifest(_manifest(prepared, settings, seed, budget.spent_s, notes))
    usual = usual_answer(prepared.held_out.base_class, prepared.inputs.split)
    state.clear()
    if nothing := told_if_nothing(rows, usual, len(prepared.inputs.train)):
        progress.note(nothing)


def _check_something_trained(
    finished: Mapping[TrialId, FinishedTrial], budget: Budget, state: RunState
) -> None:
    """Refuse to end with trials and without any cache; another command may then begin in the folder.

    **Raises:** `ModelError` if a variant failed; `DataError` if all were left out for lack of time.
    """
    trials = [row.trial for row in finished.values()]
    if not trials or any(trial.status == "trained" for trial in trials):
        return
    state.clear()
    first = next((trial for trial in trials if trial.status == "failed"), None)
    if first is not None:
        raise ModelError(
            f"no variant could be trained; {first.variant} at {first.block}: {first.reason} (name others "
            "with --variants or --blocks)"
        )
    raise nothing_trained(budget, "--budget")


def _manifest(
    prepared: PreparedModel, settings: dict[str, Any], seed: int, seconds: float, notes: Sequence[str]
) -> Manifest:
    loaded, inputs = prepared.loaded, prepared.inputs
    disturbance = prepared.profile.disturbance or (f"{len(notes)} lookups: {notes[0]}" if notes else "")
    return Manifest(
        model_source=loaded.source,
        checkpoint_path=loaded.checkpoint_path,
        checkpoint_sha256=loaded.checkpoint_sha256,
        preprocessing=loaded.preprocessing.to_json(),
        class_names=prepared.class_names,
        classes=prepared.held_out.classes,
        outputs_kind=prepared.held_out.outputs_kind,
        input_shape=prepared.traced.input_shape,
        profile=replace(prepared.profile, disturbance=disturbance),
        seed=seed,
        counts={
            "train": len(inputs.train),
            "select": int((inputs.split == 0).sum()),
            "certify": inputs.evidence,
        },
        data={
            "held_out": f"{inputs.held_out.name} {inputs.held_out.fingerprint}",
            "train": f"{inputs.train.name} {inputs.train.fingerprint}",
        },
        settings=settings,
        probe=prepared.probe,
        versions={
            "gati": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "safetensors": importlib.metadata.version("safetensors"),
        },
        peak_memory_bytes=_peak_memory_bytes(),
        explore_seconds=seconds,
        complete=True,
    )


def _peak_memory_bytes() -> int:
    """The largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
