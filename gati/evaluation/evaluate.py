"""Measure Gati against its base model, request by request, on unseen inputs."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gati.composition.load import open_served
from gati.costs.disturbance import MACHINE, Machine, measure_steadily
from gati.costs.profile import quiet
from gati.documents import DocumentKind, values_of
from gati.engine.batching import rows_of
from gati.engine.engine import Engine
from gati.engine.exits import BASE, Prediction
from gati.engine.threads import on_threads
from gati.errors import DataError, LibraryError, StorageError
from gati.evaluation.by_class import ClassCount, count_classes
from gati.evaluation.fits import check_fit
from gati.evaluation.limit import drawn_inputs
from gati.evaluation.looks import enter_look
from gati.evaluation.timing import HELD_BYTES, IN_A_ROW, answer_in_a_row
from gati.exploration.fresh import note_of_seen
from gati.exploration.labels import name_and_label
from gati.exploration.library import Library
from gati.files import atomic_write_text
from gati.model.data import load_data
from gati.model.labels import ClassNames, LabelMap
from gati.model.outputs import check_base_outputs
from gati.model.sequence import Data

_log = logging.getLogger(__name__)
_KIND = DocumentKind(1, LibraryError, "run gati evaluate again", unnumbered=True)
_WARM_UP_REQUESTS = 20
_EAGER_SAMPLES = 200
_CHUNK = 256  # most inputs preprocessed at a time, outside the timing

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds per request, summarised over all requests."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, times_ms: Sequence[float] | npt.NDArray[np.float64]) -> Latency:
        """Summarise the times of single requests."""
        times = np.asarray(times_ms)
        p50, p90, p99 = (float(value) for value in np.percentile(times, (50, 90, 99)))
        return cls(mean=float(times.mean()), p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, kw_only=True)
class ExitCount:
    """Hits of one learned cache, and their `agreement` with the base model (None without hits)."""

    block: str
    variant: str
    threshold: float
    placement: str
    hits: int
    agreement: float | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Gain, agreement and latencies of Gati on a data set; the accuracies are None without labels.

    `gain` is base mean / Gati mean, `tail_ratio` is Gati p99 / base p99. Base and Gati run on the same
    backend. `agreement` is with the user's base model, whatever the backend's precision. `eager_latency_ms`
    is the user's module called directly, on a sample. If `disturbed`, the machine was busy even when measured
    again: latencies and gain are unreliable, and `disturbance` says why.
    """

    n: int
    agreement: float
    accuracy: float | None
    base_accuracy: float | None
    hit_rate: float
    latency_ms: Latency
    base_latency_ms: Latency
    gain: float
    tail_ratio: float
    memory_bytes: int
    backend: str
    exits: tuple[ExitCount, ...]
    eager_latency_ms: Latency | None = None
    device: str = "cpu"
    threads: int = 1
    repetitions: int = 1
    data: str = ""
    composition: str = ""
    classes: tuple[ClassCount, ...] = ()
    note: str = ""
    disturbed: bool = False
    disturbance: str = ""
    composed: str = ""  # `created` of the composition

    def to_json(self) -> str:
        """The evaluation as strict JSON text."""
        return json.dumps(values_of(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def load(cls, path: Path) -> Evaluation:
        """Read what `to_json` wrote. Raises LibraryError."""
        return _KIND.record(cls, _KIND.read(path), str(path))


@dataclass
class _Answers:
    """Answers in input order."""

    gati: list[Prediction] = field(default_factory=list)
    reference: list[int] = field(default_factory=list)  # of the base model in its original precision


@dataclass
class _Times:
    """Milliseconds per request, in order, with the exit of each Gati answer and the length of its input."""

    gati_ms: list[float] = field(default_factory=list)
    base_ms: list[float] = field(default_factory=list)
    eager_ms: list[float] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


def evaluate(
    directory: str | Path,
    data: Any,
    *,
    composition: str = "default",
    limit: int | None = None,
    device: str | None = None,
    repetitions: int = 1,
    threads: int | None = None,
    class_names: ClassNames | None = None,
    label_map: LabelMap | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Answer every input of `data` with Gati and with the base model alone, one request at a time.

    `data` is an `.npz`, a folder, a dataset callable (see `load_data`) or a `Data`. `limit` draws so many
    inputs from equal parts of the data; each input is measured `repetitions` times. A request is a
    preprocessed tensor [1, ...]; base and Gati take turns of 64 requests each. `progress(done, of)` is called
    periodically. Disturbed measurements are repeated; if they are still disturbed, the result is marked. The
    library keeps it for `report`.
    `class_names` and `label_map` are as for `explore` and default to those stored there. If labels do not fit
    the network, the accuracies are None and `note` says so; it also reports inputs that `explore` has seen.

    Raises:
        DataError: there are no inputs, or they do not fit the network.
        ModelError: the network returns NaN or infinity for some inputs.
        LibraryError, CompositionError, BackendError: as for `load`.
    """
    for name, value in (("limit", limit), ("repetitions", repetitions)):
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}; at least 1 is needed")
    served = open_served(directory, composition=composition, device=device, threads=threads)
    given = load_data(data, served.model.preprocessing, what="evaluation data", explored=True)
    inputs = drawn_inputs(given, limit)
    check_fit(served.engine, inputs, "evaluation data")
    named = name_and_label(served.library, inputs, class_names, label_map)
    measured = evaluate_engine(
        served.engine,
        named.data,
        module=served.module,
        repetitions=repetitions,
        progress=progress,
        composition=composition,
        class_names=named.class_names,
    )
    enter_look(served, inputs)
    notes = (note_of_seen(served.library, inputs), named.note)
    result = replace(
        measured, note="; ".join(note for note in notes if note), composed=served.composition.created
    )
    try:
        atomic_write_text(kept_evaluation(served.library, composition), result.to_json())
    except StorageError as error:
        _log.warning("the evaluation is not kept for gati report: %s", error)
    return result


def kept_evaluation(library: Library, composition: str) -> Path:
    """The file in which a library keeps the last evaluation of a composition."""
    return library.directory / "evaluations" / f"{composition}.json"


def evaluate_engine(
    engine: Engine,
    data: Data,
    *,
    module: nn.Module | None = None,
    repetitions: int = 1,
    progress: Callable[[int, int], None] | None = None,
    composition: str = "",
    class_names: Sequence[str] | None = None,
    machine: Machine = MACHINE,
) -> Evaluation:
    """Like `evaluate`, for an engine and data already loaded; without `module`, eager mode is not timed.

    Labels, if any, must be the network's classes; `class_names` default to the engine's.
    """
    if len(data) == 0:
        raise DataError("the evaluation data is empty; give at least one input")
    measuring = _Measuring(engine, data, module, repetitions, progress, machine)
    with on_threads(engine.threads), engine, quiet():
        found = measure_steadily(measuring.rounds(), measuring.alike, machine=machine)
        threads = torch.get_num_threads()
    latency = Latency.of([taken for each in found.rounds for taken in each.gati_ms])
    base_latency = Latency.of([taken for each in found.rounds for taken in each.base_ms])
    eager_ms = [taken for each in found.rounds for taken in each.eager_ms]
    gati = measuring.answers.gati
    answers = np.array([prediction.class_index for prediction in gati])
    base_answers = np.array(measuring.answers.reference)
    hit = np.array([prediction.exit != BASE for prediction in gati])
    return Evaluation(
        n=len(data),
        agreement=float(np.mean(answers == base_answers)),
        accuracy=accuracy_of(answers, data.labels),
        base_accuracy=accuracy_of(base_answers, data.labels),
        hit_rate=float(hit.mean()),
        latency_ms=latency,
        base_latency_ms=base_latency,
        gain=base_latency.mean / latency.mean,
        tail_ratio=latency.p99 / base_latency.p99,
        memory_bytes=sum(leaving.memory_bytes for leaving in engine.exits),
        backend=engine.backend,
        exits=_exit_counts(engine, gati, answers == base_answers),
        eager_latency_ms=Latency.of(eager_ms) if eager_ms else None,
        device=str(engine.traced.device),
        threads=threads,
        repetitions=repetitions,
        data=data.name,
        composition=composition,
        classes=count_classes(answers, base_answers, hit, class_names or engine.class_names),
        disturbed=found.disturbed > 0,
        disturbance=found.note,
    )


class _Measuring:
    """Measures requests in rounds and keeps the answers of each round's first run."""

    def __init__(
        self,
        engine: Engine,
        data: Data,
        module: nn.Module | None,
        repetitions: int,
        progress: Callable[[int, int], None] | None,
        machine: Machine,
    ) -> None:
        self.answers = _Answers()
        self._engine, self._data, self._machine = engine, data, machine
        self._eager = _eager(module)
        self._repetitions = repetitions
        self._progress = progress
        self._chunk = min(_CHUNK, max(1, HELD_BYTES // data.images([0]).nbytes))
        self._usual = 0  # length of most inputs

    def rounds(self) -> list[Callable[[], _Times]]:
        """Return functions that each measure a few hundred inputs, or as many as may be in memory."""
        return [partial(self._round, start) for start in range(0, len(self._data), self._chunk)]

    def alike(self, times: _Times) -> list[list[float]]:
        """Return the base model's times by length, then Gati's by length and exit; the usual length first."""
        self._usual = self._usual or statistics.mode(times.lengths)  # so that rounds can be compared
        base: dict[int, list[float]] = {self._usual: []}
        ours: dict[tuple[int, str], list[float]] = {}
        for at, length in enumerate(times.lengths):
            base.setdefault(length, []).append(times.base_ms[at])
            ours.setdefault((length, times.exits[at]), []).append(times.gati_ms[at])
        return [*base.values(), *ours.values()]

    def _round(self, start: int) -> _Times:
        data, engine, times = self._data, self._engine, _Times()
        rows = data.images(range(start, min(start + self._chunk, len(data)))).to(engine.traced.device)
        keep = len(self.answers.gati) == start
        if start == 0:
            _warm_up(engine, self._eager, rows)
        every = max(1, len(data) // _EAGER_SAMPLES)
        chunk = start // self._chunk  # of large inputs it is a single turn
        for number, row in enumerate(rows.split(IN_A_ROW)):
            for repetition in range(self._repetitions):
                gati_first = (chunk + number + repetition) % 2 == 1
                self._take_turns(row, times, gati_first=gati_first, keep=keep and repetition == 0)
            sampled = row[-(start + number * IN_A_ROW) % every :: every]
            if self._eager is not None and len(sampled):
                self._timed(self._eager, map(engine.shortened, rows_of(sampled)), times.eager_ms)
        if keep and engine.precision != "f32":
            self.answers.reference[start:] = engine.reference(rows).tolist()
        if keep and self._progress is not None:
            self._progress(start + len(rows), len(data))
        return times

    def _take_turns(self, row: Tensor, times: _Times, *, gati_first: bool, keep: bool) -> None:
        if gati_first:
            gati = self._gati_turn(row, times)
            base = self._base_turn(row, times)
        else:
            base = self._base_turn(row, times)
            gati = self._gati_turn(row, times)
        times.exits += [prediction.exit for prediction in gati]
        times.lengths += [self._engine.shortened(x).shape[-1] for x in rows_of(row)]
        if keep:
            check_base_outputs(torch.stack([prediction.probabilities for prediction in base]))
            self.answers.gati += gati
            self.answers.reference += [prediction.class_index for prediction in base]

    def _base_turn(self, row: Tensor, times: _Times) -> list[Prediction]:
        self._engine.close()  # the plain network must not miss the cores of overlapped lookups
        return self._timed(lambda x: self._engine.base(x)[0], rows_of(row), times.base_ms)

    def _gati_turn(self, row: Tensor, times: _Times) -> list[Prediction]:
        self._engine.open()
        return self._timed(lambda x: self._engine(x)[0], rows_of(row), times.gati_ms)

    def _timed(
        self, ask: Callable[[Tensor], _T], requests: Iterable[Tensor], times_ms: list[float]
    ) -> list[_T]:
        answers, taken_ms = answer_in_a_row(ask, list(requests), self._machine)
        times_ms += taken_ms
        return answers


def _eager(module: nn.Module | None) -> Callable[[Tensor], Any] | None:
    if module is None:
        return None

    def call(x: Tensor) -> Any:
        with torch.inference_mode():
            return module(x).cpu()

    return call


def _warm_up(engine: Engine, eager: Callable[[Tensor], Any] | None, rows: Tensor) -> None:
    requests = [rows[request % len(rows)].unsqueeze(0) for request in range(_WARM_UP_REQUESTS)]
    for x in (*engine.examples(), *requests):
        engine.base(x)
        engine(x)
        if eager is not None:
            eager(engine.shortened(x.clone()))


def accuracy_of(answers: npt.NDArray[np.int64], labels: npt.NDArray[np.int64] | None) -> float | None:
    """The share of right answers; None without labels."""
    return None if labels is None else float(np.mean(answers == labels))


def _exit_counts(
    engine: Engine, predictions: Sequence[Prediction], agrees: npt.NDArray[np.bool_]
) -> tuple[ExitCount, ...]:
    counts = []
    for leaving in engine.exits:
        here = np.array([prediction.exit == leaving.block for prediction in predictions])
        hits = int(here.sum())
        agreement = float(agrees[here].mean()) if hits else None
        counts.append(
            ExitCount(
                block=leaving.block,
                variant=leaving.variant,
                threshold=leaving.threshold,
                placement=leaving.placement,
                hits=hits,
                agreement=agreement,
            )
        )
    return tuple(counts)
