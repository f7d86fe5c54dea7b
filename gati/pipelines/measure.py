"""Measure every option of a pipeline on data: how long an input takes, and how often its label is right."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gati.errors import DataError, PipelineError
from gati.pipelines.behaviours import Answers, behaviours, confidence_levels, spread
from gati.pipelines.measurements import (
    KEPT_SAMPLES,
    Measurements,
    OptionMeasurement,
    StageMeasurement,
    measurements_file,
)
from gati.pipelines.pipeline import CacheLibrary, Option, Pipeline, PlainModel, Stage, describe_source
from gati.pipelines.read import load_pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from gati.engine.engine import Engine
    from gati.model.sequence import Data

_WARM_UP_REQUESTS = 20

Source = CacheLibrary | PlainModel


@dataclass(frozen=True)
class Outcomes:
    """Answers of one source, input by input: latency_ms [n], probabilities [n, classes], exits [n]."""

    latency_ms: npt.NDArray[np.float64]
    probabilities: npt.NDArray[np.float64]
    exits: tuple[str, ...]
    backend: str


def measure_pipeline(
    path: str | Path,
    data: Any,
    *,
    limit: int | None = None,
    device: str = "cpu",
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Measurements:
    """Measure every option on data that it has not seen, and write the figures next to the pipeline file.

    The options take turns on every input, one request at a time, so that temporary slowness of the machine
    affects all. `data` is an `.npz`, a folder, a dataset callable or a `Data` (see
    `gati.model.data.load_data`), with plain models only an `.npz`. Labels with names (folders, classes in a
    table) are matched to the pipeline's `class_names` by name, other labels are indices into them. An option
    is measured on the inputs of its own stage, whose true class is one of the stage's, and separately on
    inputs that were easy or hard in the previous stage (`gati.pipelines.behaviours`). Without labels, only
    latencies are measured. `limit` takes only so many inputs, drawn from equal parts of the data: folders are
    sorted by class.

    **Raises:** `PipelineError` for the file, `DataError` for the data, and the errors of `open_engine`.
    """
    pipeline = load_pipeline(path, measured=False)
    outcomes, inputs = measure_outcomes(
        pipeline, data, limit=limit, device=device, threads=threads, progress=progress
    )
    measurements = summarize(pipeline, outcomes, inputs, device=device)
    measurements.save(measurements_file(Path(path)))
    return measurements


def measure_outcomes(
    pipeline: Pipeline,
    data: Any,
    *,
    limit: int | None = None,
    device: str = "cpu",
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[Source, Outcomes], Data]:
    """Let every source of the pipeline answer every input. Raises the same errors as `measure_pipeline`.

    What does not fit together is reported before anything is measured.
    """
    from gati.costs.profile import quiet
    from gati.evaluation.limit import drawn_inputs
    from gati.model.data import load_data

    if limit is not None and limit < 2:
        raise DataError(f"limit is {limit}; at least 2 inputs are needed")
    stages = pipeline.stages.values()
    sources = list(dict.fromkeys(option.source for stage in stages for option in stage.options.values()))
    images = _first_images(data) if any(isinstance(source, PlainModel) for source in sources) else None
    turns = []
    for source in sources:
        engine = open_engine(source, images, device=device, threads=threads)
        found = load_data(data, engine.preprocessing, what="pipeline data")
        turns.append(_Turn(engine, drawn_inputs(found, limit)))
    count = len(turns[0].data)
    labels = _labels(pipeline, turns[0].data)
    for stage in stages:
        _own(stage, labels, count)
    engines = {source: turn.engine for source, turn in zip(sources, turns, strict=True)}
    for stage in stages:
        for option in stage.options.values():
            _check_names(stage, option, engines[option.source].class_names)
    with quiet():
        classes = {source: turn.warm_up() for source, turn in zip(sources, turns, strict=True)}
        for stage in stages:
            for option in stage.options.values():
                _check_classes(stage, option, classes[option.source])
        for index in range(count):
            for place in range(len(turns)):
                turns[(index + place) % len(turns)].answer(index)
            if progress is not None and (index + 1) % 50 == 0:
                progress(index + 1, count)
    if progress is not None:
        progress(count, count)
    return {source: turn.outcomes() for source, turn in zip(sources, turns, strict=True)}, turns[0].data


def summarize(
    pipeline: Pipeline, outcomes: dict[Source, Outcomes], data: Data, *, device: str = "cpu"
) -> Measurements:
    """Summarize outcomes as figures for planning. Raises `DataError` for labels of unknown classes."""
    import torch

    labels = _labels(pipeline, data)
    folder = Path() if pipeline.path is None else pipeline.path.parent
    return Measurements(
        pipeline.name,
        data.name,
        data.fingerprint,
        device,
        torch.get_num_threads(),
        datetime.now(UTC).isoformat(timespec="seconds"),
        {
            name: _summarize_stage(pipeline, stage, outcomes, labels, folder)
            for name, stage in pipeline.stages.items()
        },
    )


def _labels(pipeline: Pipeline, data: Data) -> npt.NDArray[np.int64] | None:
    """The class of each input, int64 [n] in the order of the pipeline's `class_names`; None without labels.

    Data numbers its folders in sorted order, and only those that it has: not as the pipeline numbers classes.
    So names count alone, never positions. Names that are numbers, such as folders `0` to `10`, are indices.
    """
    if data.labels is None:
        return None
    own, names = data.class_names, pipeline.class_names
    index = {name: position for position, name in enumerate(names)}
    if own is not None and not any(name.isdecimal() for name in names):  # else `0` may be a class's own name
        index |= {name: int(name) for name in own if name.isdecimal()}  # also 00, 01 and so on
    present, inverse = np.unique(data.labels, return_inverse=True)
    found = []
    for label in present.tolist():
        if own is not None and label >= len(own):
            raise DataError(
                f"{data.name} has label {label} but names only {len(own)} classes itself; correct its "
                "labels or its class names"
            )
        position = label if own is None else index.get(own[label], len(names))
        if position >= len(names):
            what = f"label {label}" if own is None else f"class '{own[label]}'"
            raise DataError(
                f"{data.name} has {what} but the pipeline names {len(names)} classes: {_few(names)}; correct "
                "class_names, or the names in the data"
            )
        found.append(position)
    return np.array(found, dtype=np.int64)[inverse.reshape(-1)]


def _few(names: Sequence[str], most: int = 12) -> str:
    """Some names, for a message of one line."""
    return ", ".join(names[:most]) + (" and others" if len(names) > most else "")


def _own(stage: Stage, labels: npt.NDArray[np.int64] | None, count: int) -> npt.NDArray[np.bool_]:
    """Which inputs belong to a stage, bool [n]: all without labels. Raises `DataError` if none does."""
    among: npt.NDArray[np.bool_] = (
        np.ones(count, dtype=np.bool_) if labels is None else stage.truth.by_class[labels] >= 0
    )
    if not among.any():
        raise DataError(f"no input of the data belongs to stage '{stage.name}'; measure on more data")
    return among


def _check_names(stage: Stage, option: Option, names: Sequence[str] | None) -> None:
    """Raise `PipelineError` if the option's library has the names of `class_names` in another order."""
    for index, (found, given) in enumerate(zip(names or (), option.class_names, strict=False)):
        if found != given and found in option.class_names:
            raise PipelineError(
                f"stage '{stage.name}', option '{option.name}': class {index} is '{found}' in its library "
                f"but '{given}' in class_names; correct class_names or, if the library is wrong, "
                "explore with --class-names"
            )


def _check_classes(stage: Stage, option: Option, classes: int) -> None:
    """Raise `PipelineError` unless the pipeline names as many classes as the option's network has."""
    if classes != option.label_map.classes:
        raise PipelineError(
            f"stage '{stage.name}', option '{option.name}': {classes} classes, but the pipeline names "
            f"{option.label_map.classes}; correct class_names"
        )


def _summarize_stage(
    pipeline: Pipeline,
    stage: Stage,
    outcomes: dict[Source, Outcomes],
    labels: npt.NDArray[np.int64] | None,
    folder: Path,
) -> StageMeasurement:
    among = _own(stage, labels, len(next(iter(outcomes.values())).latency_ms))
    shares = {}
    if labels is not None:
        truth = stage.truth.by_class[labels]
        shares = {label: float(np.mean(truth[among] == index)) for index, label in enumerate(stage.labels)}
    before: dict[str, Answers] = {}
    edges = pipeline.edges_to[stage.name]
    if labels is not None and len(edges) == 1:
        earlier = pipeline.stages[edges[0].source]
        before = {
            name: _answers(earlier, option, outcomes[option.source], labels)[0]
            for name, option in earlier.options.items()
        }
    options = {
        name: _summarize_option(stage, option, outcomes[option.source], among, labels, before, folder)
        for name, option in stage.options.items()
    }
    return StageMeasurement(
        int(among.sum()), shares, options, stage.truth.by_label, tuple(edge.source for edge in edges)
    )


def _summarize_option(
    stage: Stage,
    option: Option,
    outcomes: Outcomes,
    among: npt.NDArray[np.bool_],
    labels: npt.NDArray[np.int64] | None,
    before: dict[str, Answers],
    folder: Path,
) -> OptionMeasurement:
    left = Counter(name for name, own in zip(outcomes.exits, among, strict=True) if own)
    measured = OptionMeasurement(
        describe_source(option.source, folder),
        None,
        spread(outcomes.latency_ms[among], KEPT_SAMPLES),
        {name: times / int(among.sum()) for name, times in left.items()},
        outcomes.backend,
        levels=(),
        behaviours=(),
    )
    if labels is None:
        return measured
    answers, levels = _answers(stage, option, outcomes, labels)
    return replace(
        measured,
        accuracy=float(answers.right[among].mean()),
        levels=levels,
        behaviours=tuple(behaviours(answers, among, before)),
    )


def _answers(
    stage: Stage, option: Option, outcomes: Outcomes, labels: npt.NDArray[np.int64]
) -> tuple[Answers, tuple[float, ...]]:
    """Answers of an option to all inputs, and bounds of its confidence levels on the stage's own inputs."""
    _check_classes(stage, option, outcomes.probabilities.shape[1])
    truth = stage.truth.by_class[labels]
    confidence = outcomes.probabilities.max(axis=1)
    levels = confidence_levels(confidence[truth >= 0])
    level = (confidence[:, None] < np.array(levels)).sum(axis=1)
    return Answers(option.label_map.rows(outcomes.probabilities) == truth, level, outcomes.latency_ms), levels


class _Turn:
    """One of the engines that take turns on the same inputs."""

    def __init__(self, engine: Engine, data: Data) -> None:
        self.engine = engine
        self.data = data
        self._latency_ms: list[float] = []
        self._probabilities: list[npt.NDArray[np.float64]] = []
        self._exits: list[str] = []

    def warm_up(self) -> int:
        """Answer some inputs; return the number of classes."""
        for index in range(min(_WARM_UP_REQUESTS, len(self.data))):
            prediction = self.engine(self._input(index))[0]
        self.engine.close()
        return len(prediction.probabilities)

    def answer(self, index: int) -> None:
        x = self._input(index)
        if self.engine.overlapped:  # reserve its cores, and warm up with an untimed request
            self.engine.open()
            self.engine(x.clone())
        start = time.perf_counter_ns()
        prediction = self.engine(x)[0]
        self._latency_ms.append((time.perf_counter_ns() - start) / 1e6)
        self.engine.close()
        self._probabilities.append(prediction.probabilities.double().numpy())
        self._exits.append(prediction.exit)

    def outcomes(self) -> Outcomes:
        return Outcomes(
            np.array(self._latency_ms),
            np.stack(self._probabilities),
            tuple(self._exits),
            self.engine.backend,
        )

    def _input(self, index: int) -> Tensor:
        return self.data.images([index])


def _first_images(data: Any) -> npt.NDArray[np.uint8]:
    """The first two images of the data, for a network that does not state its input size."""
    from gati.model.archives import read_npz

    if not isinstance(data, str | Path) or Path(data).suffix != ".npz":
        raise DataError("measuring a pipeline with plain models needs an .npz with images; give one")
    images = read_npz(Path(data), "pipeline data").get("images")
    if images is None or images.ndim not in (3, 4):
        raise DataError(f"pipeline data: {data} has no `images` [N, H, W, C]; plain models need them")
    return images[:2, ..., None] if images.ndim == 3 else images[:2]


def open_engine(
    source: CacheLibrary | PlainModel,
    images: npt.NDArray[np.uint8] | None = None,
    *,
    device: str = "cpu",
    threads: int | None = None,
) -> Engine:
    """Load the engine of an option. Options with equal sources can share one engine.

    A plain model is traced on `images`, two or more uint8 [N, H, W, C] of the size that requests have; a
    cache library needs none.

    **Raises:** `LibraryError`, `CompositionError`, `BackendError`, `ModelError`, as `gati.load` does;
    `DataError` for a plain model without images.
    """
    from gati.composition.load import load, load_base, open_plain_model

    if isinstance(source, PlainModel):
        if images is None or len(images) < 2:
            raise DataError(f"model {source.model} needs two images to find its input size; give images")
        return open_plain_model(
            source.model, source.checkpoint, images=images, device=device, threads=threads
        ).base()
    if source.composition is None:
        return load_base(source.directory, device=device, threads=threads)
    return load(source.directory, composition=source.composition, device=device, threads=threads)
