"""The verb `explore`: a network and held-out data in, a cache library out."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gati.caches import expand_variants, load_cache, parse_variant
from gati.errors import DataError, VariantError
from gati.explore.library import BaseOutcomes, Library, Manifest
from gati.explore.prepare import Prepared, prepare, resolve_device
from gati.explore.progress import Progress, SilentProgress
from gati.explore.rounds import Rounds
from gati.explore.schedule import plan_training
from gati.explore.state import FinishedTrial, RunState, locked
from gati.model.labels import ClassNames, LabelMap, read_class_names, read_label_map
from gati.model.load import LoadedModel, load_model
from gati.runtime.profile import measure_lookup, measure_overlap
from gati.types import Trial, TrialId
from gati.variants import FAMILIES
from gati.version import __version__

__all__ = ["explore"]

_DEFAULT_EPOCHS = 9.0


def explore(
    model: str,
    checkpoint: str | Path | None = None,
    *,
    data: Any,
    train_data: Any | None = None,
    out: str | Path,
    blocks: str | None = None,
    variants: Sequence[str] | None = None,
    device: str = "cpu",
    epochs: float | None = None,
    budget_s: float | None = None,
    seed: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    resize: int | None = None,
    class_names: ClassNames | None = None,
    label_map: LabelMap | None = None,
    progress: Progress | None = None,
) -> Library:
    """Train and measure every variant at every block of a network, and write the cache library.

    An interrupted exploration goes on where it stopped when called again with the same arguments; a
    finished one is returned as it is. The network is never changed. The same seed trains the same weights
    again on the same machine; latencies are measured anew, and with them which variants are skipped.

    **Arguments:**

    - `model`, `checkpoint`: what `gati.model.load_model` takes.
    - `data`: inputs the network was *not* trained on. They are split by `seed` into inputs to select on
      and inputs to certify on, half and half up to 800 and a third and two thirds from 1,200 on, after a
      third for training when there is no `train_data`; copies of an input stay together. What is certified
      later assumes that they were drawn independently from what will be served.
    - `train_data`: more inputs, for the predictors alone; they may be the network's own training set. Those
      that are in `data`, too, are left out.
    - `out`: the cache library's directory.
    - `blocks`: a pattern over module names; all blocks are found by default.
    - `variants`: such as `["fc(512)", "pyramid(64)"]`; `"default"`, which is the default, and `"published"`
      stand for several.
    - `epochs`: passes of the main round over the training inputs.
    - `budget_s`: end within this many seconds, with the best so far.
    - `class_names`: the network's, in the order of its outputs: a list, or a file with one a line or a JSON
      list. Otherwise those that come with it, or those of the data if they are as many.
    - `label_map`: which class of the network each label of `data` is, by folder name or label number: a
      mapping, or a file with a JSON object. Labels that do not fit otherwise are left out.

    **Returns:** the finished library.

    **Raises:** `ModelError`, `DataError`, `VariantError`, `BackendError`, `StorageError`; `LibraryError` when
    `out` holds another exploration or another process writes to it.
    """
    began = time.monotonic()
    directory = Path(out)
    names = expand_variants(variants if variants is not None else ("default",))
    if not names:
        raise VariantError("no variants given: name at least one, such as pyramid(64)")
    if epochs is not None and epochs <= 0:
        raise DataError(f"epochs must be above 0 (got {epochs:g})")
    target = resolve_device(device)
    loaded = load_model(model, checkpoint, mean=mean, std=std, resize=resize)
    for name in names:  # after the model, whose module may register predictors of its own
        parse_variant(name)
    with locked(directory), progress or SilentProgress() as reporter:
        if loaded.note:
            reporter.note(loaded.note)
        settings = {
            **_settings(loaded, data, train_data, blocks, names, target, epochs, budget_s, seed),
            **_named(class_names, label_map),
        }
        library, state = Library(directory), RunState(directory)
        if library.manifest_path.is_file() and library.manifest.settings == settings:
            reporter.note(f"{directory} is finished already: nothing to do")
            return library
        state.claim({**settings, "families": FAMILIES})
        prepared = prepare(
            loaded,
            data,
            train_data,
            blocks=blocks,
            variants=names,
            device=target,
            seed=seed,
            state=state,
            progress=reporter,
            class_names=class_names,
            label_map=label_map,
        )
        library.write_input_record(prepared.inputs.record)
        library.write_base_outcomes(
            BaseOutcomes(prepared.held_out.base_class, prepared.labels, prepared.inputs.split)
        )
        plan = plan_training(len(prepared.inputs.train), epochs=epochs or _DEFAULT_EPOCHS)
        rounds = Rounds(
            prepared, library, state, plan, seed=seed, progress=reporter, budget_s=budget_s, began=began
        )
        rounds.screen()
        rounds.main()
        notes: list[str] = []
        rows = _finish_trials(prepared, library, state, reporter, notes)
        library.write_trials(rows, _points(state, rows))
        library.write_manifest(_manifest(prepared, settings, seed, began, notes))
        state.clear()
    return library


def _settings(
    loaded: LoadedModel,
    data: Any,
    train_data: Any | None,
    blocks: str | None,
    variants: Sequence[str],
    device: torch.device,
    epochs: float | None,
    budget_s: float | None,
    seed: int,
) -> dict[str, Any]:
    """What makes two explorations the same one. JSON types only."""
    return {
        "model": loaded.source,
        "checkpoint_sha256": loaded.checkpoint_sha256,
        "preprocessing": loaded.preprocessing.to_json(),
        "data": str(data),
        "train_data": None if train_data is None else str(train_data),
        "blocks": blocks,
        "variants": list(variants),
        "device": str(device),
        "epochs": epochs,
        "budget_s": budget_s,
        "seed": seed,
        "gati": __version__,
    }


def _named(class_names: ClassNames | None, label_map: LabelMap | None) -> dict[str, Any]:
    """What was said about names and labels, itself and not the file; nothing where nothing was said."""
    said: dict[str, Any] = {}
    if class_names is not None:
        said["class_names"] = list(read_class_names(class_names))
    if label_map is not None:
        said["label_map"] = read_label_map(label_map)
    return said


def _finish_trials(
    prepared: Prepared, library: Library, state: RunState, progress: Progress, notes: list[str]
) -> list[Trial]:
    """Every row of the trials table, its lookup measured as it will run: trained, with its selector.

    `notes` gets a line for each measurement that other work on the machine disturbed.
    """
    finished = state.finished()
    measured: dict[tuple[str, tuple[int, ...], str], tuple[float, float, float]] = {}
    progress.stage("measuring lookups", len(prepared.specifications))
    rows = []
    for item in prepared.specifications:
        row = finished.get(item.trial.trial_id)
        progress.advance(1)
        if row is None:
            rows.append(item.trial)
            continue
        key = (item.trial.variant, item.hidden_shape, row.trial.selector)
        if key not in measured:
            measured[key] = _lookup_costs(prepared, library, row, item.hidden_shape, notes)
        lookup_ms, overlapped_ms, penalty_ms = measured[key]
        rows.append(
            replace(
                row.trial,
                lookup_ms=lookup_ms,
                overlapped_lookup_ms=overlapped_ms,
                overlapped_penalty_ms=penalty_ms,
            )
        )
    return rows


def _lookup_costs(
    prepared: Prepared, library: Library, row: FinishedTrial, shape: tuple[int, ...], notes: list[str]
) -> tuple[float, float, float]:
    cache = load_cache(library.cache_path(row.trial.trial_id)).to(prepared.device)
    hidden = torch.rand(1, *shape, device=prepared.device)
    request = prepared.traced.example()
    inline_ms = measure_lookup(
        cache, hidden, between=lambda: prepared.traced.base(request.clone()), notes=notes
    )
    # Each measurement takes the worker's core away from the base model by itself, as serving will: what
    # that costs the base model is part of the penalty.
    overlap = measure_overlap(prepared.traced, row.trial.block, cache, repetitions=10, notes=notes)
    return inline_ms, overlap.lookup_ms, overlap.penalty_ms


def _points(state: RunState, rows: Sequence[Trial]) -> list[Any]:
    finished = state.finished()
    trained: list[TrialId] = [row.trial_id for row in rows if row.trial_id in finished]
    return [point for trial_id in trained for point in finished[trial_id].points]


def _manifest(
    prepared: Prepared, settings: dict[str, Any], seed: int, began: float, notes: Sequence[str]
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
            "certify": int((inputs.split == 1).sum()),
        },
        data={
            "held_out": f"{inputs.held_out.name} {inputs.held_out.fingerprint}",
            "train": f"{inputs.train.name} {inputs.train.fingerprint}",
        },
        settings=settings,
        versions={
            "gati": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "safetensors": importlib.metadata.version("safetensors"),
        },
        peak_memory_bytes=peak_memory_bytes(),
        explore_seconds=time.monotonic() - began,
        complete=True,
    )


def peak_memory_bytes() -> int:
    """The largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
