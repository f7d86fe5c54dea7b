"""`gati bench`: Gati, the plain network and published peers, on every backend that runs here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gati.composition.batches import in_fitting_batches
from gati.composition.costs import as_composed
from gati.composition.engines import graph_backend, graph_kind, graphs_of
from gati.composition.load import Served, open_served
from gati.engine.backends import BACKENDS, GraphBackend
from gati.engine.engine import Engine
from gati.engine.exits import EngineExit
from gati.engine.threads import on_threads
from gati.errors import BackendError, DataError, GatiError, StorageError, one_line
from gati.evaluation.bench_machine import machine_here, versions_here
from gati.evaluation.bench_result import (
    Bench,
    BenchMethod,
    BenchRow,
    Histogram,
    Kind,
    LeftOut,
    spread,
)
from gati.evaluation.cascade import build_cascade
from gati.evaluation.evaluate import Latency, accuracy_of
from gati.evaluation.fits import check_fit
from gati.evaluation.limit import drawn_inputs
from gati.evaluation.looks import enter_look
from gati.evaluation.peers import build_peers
from gati.evaluation.timing import (
    HELD_BYTES,
    WARM_UP_REQUESTS,
    BenchEntry,
    measure_latency,
    measure_throughput,
    mixed_inputs,
    requests_of,
)
from gati.exploration.fresh import note_of_seen
from gati.exploration.labels import name_and_label
from gati.exploration.library import Library
from gati.exploration.network import load_network
from gati.files import atomic_write_text
from gati.model.data import load_data
from gati.model.labels import LabelMap
from gati.model.outputs import check_base_outputs
from gati.model.segments import TracedModel
from gati.model.sequence import Data

_log = logging.getLogger(__name__)
_BINS = 40
_METHOD = (
    "One process, batch size 1. Every method answers every request, in turns of 64 requests in a row, after "
    "a few untimed ones; who begins changes with each turn. A repetition is one pass over all inputs; ratios "
    "compare means within a repetition. The fastest network alone is the fastest whose answers agree with "
    "those of the float32 network as often as the composition's have to, or as they do here if that is less "
    "often; where none does, the fastest of all. "
    "Throughput: each client is a thread with one request in flight. Segment backends batch waiting inputs "
    "at segment boundaries (for the plain network, at its input); graph backends run one single-threaded "
    "graph per core. Lookups are inline."
)


def bench(
    directory: str | Path,
    data: Any,
    *,
    composition: str = "default",
    limit: int | None = None,
    repetitions: int = 3,
    clients: int = 8,
    seconds: float = 1.0,
    threads: int | None = None,
    cascade: str | Path | None = None,
    label_map: LabelMap | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Bench:
    """Compare every way to run the base model on this machine, and write `bench.json` into the library.

    The base model and Gati run on every registered backend that works here; the peers (BranchyNet-style and
    SDN-style exits) run on the composition's backend. `data` is as for `evaluate`. Throughput is measured for
    `seconds` per repetition; 0 skips it. `cascade` is the library of a smaller network for the same data.
    `label_map` is as for `explore` and defaults to the one stored there.
    `left_out` lists what could not be measured and why. Rounds disturbed by other work on the machine are
    repeated; if any are still disturbed, the result is marked.

    Raises:
        DataError, ModelError: there are no inputs, or they do not fit the network.
        LibraryError, CompositionError, BackendError: as for `load`.
    """
    _check_numbers(limit, repetitions, clients, seconds)
    smaller = None if cascade is None else Library.open(cascade)
    served = open_served(directory, composition=composition, threads=threads)
    given = load_data(data, served.model.preprocessing, what="benchmark data", explored=True)
    given.keep(HELD_BYTES)
    inputs = drawn_inputs(given, limit)
    check_fit(served.engine, inputs, "benchmark data")
    named = name_and_label(served.library, inputs, label_map=label_map)
    inputs = named.data
    device, count = served.engine.traced.device, served.engine.threads
    reference = float32_classes(served.module, inputs, device)
    with on_threads(count), _Field.open(served, smaller) as field:
        request = requests_of(inputs)
        steady = measure_latency(field.contenders, request, len(inputs), repetitions, progress)
        rates = _throughput(field, inputs, sorted({1, clients}), repetitions, seconds)
    enter_look(served, inputs)
    fastest, rows = _rows(field, rates, reference, inputs, served.composition.accuracy_target)
    result = Bench(
        composition=composition,
        accuracy_target=served.composition.accuracy_target,
        data=inputs.name,
        n=len(inputs),
        repetitions=repetitions,
        clients=clients,
        accuracy_f32=accuracy_of(reference, inputs.labels),
        fastest_static=fastest,
        rows=rows,
        left_out=tuple(field.left_out),
        machine=machine_here(device, count),
        versions=versions_here(),
        method=BenchMethod(text=_METHOD, warm_up_requests=WARM_UP_REQUESTS, throughput_seconds=seconds),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        note="; ".join(each for each in (note_of_seen(served.library, inputs), named.note) if each),
        disturbed=steady.disturbed > 0,
        disturbance=steady.note,
        composed=served.composition.created,
    )
    try:
        atomic_write_text(served.library.directory / "bench.json", result.to_json())
    except StorageError as error:
        _log.warning("the comparison is not kept for gati report: %s", error)
    return result


def _check_numbers(limit: int | None, repetitions: int, clients: int, seconds: float) -> None:
    for name, value in (("limit", limit), ("repetitions", repetitions), ("clients", clients)):
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}; at least 1 is needed")
    if not 0.0 <= seconds < float("inf"):
        raise DataError(f"seconds is {seconds}; give 0 or more")


class _Field:
    """The contenders that can be built here, and the reasons why others cannot."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served = served
        self.contenders: list[BenchEntry] = []
        self.kinds: dict[str, Kind] = {}
        self.details: dict[str, str] = {}
        self.weights_bytes: dict[str, int] = {}  # of the networks, without caches
        self.left_out: list[LeftOut] = []
        self._folder = folder

    @classmethod
    @contextmanager
    def open(cls, served: Served, smaller: Library | None) -> Iterator[_Field]:
        """Build the contenders; on exit, stop their threads and delete their files."""
        with TemporaryDirectory() as folder:
            field = cls(served, Path(folder))
            try:
                field._build(smaller)
                yield field
            finally:
                for contender in field.contenders:
                    contender.close()

    def _build(self, smaller: Library | None) -> None:
        served = self.served
        own = served.engine.backend
        for backend in dict.fromkeys([own, *BACKENDS]):
            self._add(f"base {backend}", "base", (), backend)
            if served.engine.exits and not self._why_not(backend):  # otherwise nothing to compare with
                self._add(f"gati {backend}", "gati", served.engine.exits, backend)
        if reason := self._why_not(own):
            raise BackendError(f"the composition's backend '{own}' does not run here: {reason}")
        with self._or_left_out("BranchyNet-style and SDN-style exits"):
            composed = served.composition
            costed = as_composed(served.library, composed.backend, composed.measured_on)
            for peer in build_peers(costed, served.module, composed.accuracy_target):
                self._add(f"{peer.name} {own}", "peer", peer.exits, own, detail=peer.detail)
        if smaller is None:
            reason = "needs a library of a smaller network: --cascade DIR"
            self.left_out.append(LeftOut(name="cascade of two base models", reason=reason))
        else:
            self._add_cascade(smaller)

    def _add_cascade(self, smaller: Library) -> None:
        """Add a cascade: a smaller network before the full one, both on the composition's backend."""
        own = self.served.engine
        name = f"cascade {own.backend}"
        with self._or_left_out(name):
            module, traced = load_network(smaller, own.traced.device)
            first, then = (
                Engine(
                    network,
                    outputs_kind=library.manifest.outputs_kind,
                    backend=own.backend,
                    graphs=self._graphs(library, network, own.backend, ()),
                )
                for library, network in ((smaller, traced), (self.served.library, own.traced))
            )
            accuracy = self.served.composition.accuracy_target
            built = build_cascade(self.served.library, smaller, then, first, accuracy)
            source = smaller.manifest.model_source
            detail = (
                f"{source} answers if its largest probability is at least {built.threshold:.4g}; the "
                "threshold was set on the select split, not certified"
            )
            self._enter(built, "peer", detail, module)

    def _add(
        self,
        name: str,
        kind: Kind,
        exits: Sequence[EngineExit],
        backend: str,
        *,
        detail: str = "",
    ) -> None:
        """Add the network with `exits`, or without any; if it fails without, the backend is left out."""
        inline = tuple(replace(leaving, placement="inline") for leaving in exits)
        own = self.served.engine
        with self._or_left_out(name if exits else backend):
            engine = Engine(
                own.traced,
                # Placements were chosen for the composition's backend; every backend supports inline.
                exits if backend == own.backend else inline,
                outputs_kind=self.served.model.outputs_kind,
                backend=backend,
                graphs=self._graphs(self.served.library, own.traced, backend, inline),
                lookup_cores=own.lookup_cores,
            )
            self._enter(BenchEntry(name, engine, bool(exits)), kind, detail or self._detail(kind, engine))

    @contextmanager
    def _or_left_out(self, name: str) -> Iterator[None]:
        """Leave out what is called `name`, and say why, if anything fails."""
        try:
            yield
        except Exception as error:  # each runtime and compiler raises its own
            _log.info("%s is left out", name, exc_info=True)
            reason = str(error) if isinstance(error, GatiError) else one_line(error)
            self.left_out.append(LeftOut(name=name, reason=reason))

    def _why_not(self, name: str) -> str:
        return next((left.reason for left in self.left_out if left.name == name), "")

    def _enter(self, contender: BenchEntry, kind: Kind, detail: str, *further: nn.Module) -> None:
        """Add a contender once it has answered a request: some backends fail only then, when they compile.

        `further` are networks that it runs besides the base model.
        """
        try:
            contender.answer(contender.engine.examples()[0])
        finally:
            contender.engine.close()
        self.contenders.append(contender)
        self.kinds[contender.name] = kind
        self.details[contender.name] = detail
        self.weights_bytes[contender.name] = sum(map(_bytes_of, (self.served.module, *further)))

    def _graphs(
        self, library: Library, traced: TracedModel, backend: str, exits: tuple[EngineExit, ...]
    ) -> tuple[Path, Path] | None:
        """The graphs that serve; a calibrated backend, which runs only stored ones, gets others made here."""
        kind = graph_kind(backend)
        if kind is None:
            return None
        stored: dict[tuple[EngineExit, ...], Path] = {}
        if library is self.served.library and backend == self.served.engine.backend:
            early, base = graphs_of(library, self.served.composition)
            stored = {(): base, self.served.engine.exits: early}
        if not kind.calibrated:
            return (stored[exits], stored[()]) if exits in stored else None
        executes: GraphBackend | None = None
        paths: list[Path] = []
        for chosen in (exits, ()):
            kept = stored.get(chosen)
            if kept is None or not kept.is_file():
                executes = executes or graph_backend(library, backend)
                kept = self._folder / f"{len(list(self._folder.iterdir()))}.zip"
                (model,) = executes.assembled(traced, [chosen], library.manifest.outputs_kind)
                kept.write_bytes(model)
            paths.append(kept)
        return paths[0], paths[1]

    def _detail(self, kind: Kind, engine: Engine) -> str:
        if kind != "gati":
            return ""
        where = ", ".join(leaving.block for leaving in engine.exits)
        other = engine.backend != self.served.composition.backend
        return f"exits after {where}" + ("; composed for another backend" if other else "")


def _throughput(
    field: _Field, inputs: Data, clients: Sequence[int], repetitions: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    rates: dict[str, dict[str, list[float]]] = {each.name: {} for each in field.contenders}
    if seconds == 0:
        return rates
    images = mixed_inputs(inputs)
    for _ in range(repetitions):
        for many in clients:
            for contender in field.contenders:
                if many > 1 and not contender.many:
                    continue
                rate = measure_throughput(
                    contender, lambda index: images[index : index + 1], len(images), many, seconds
                )
                rates[contender.name].setdefault(str(many), []).append(rate)
    return rates


def _rows(
    field: _Field, rates: dict[str, dict[str, list[float]]], reference: Any, inputs: Data, target: float
) -> tuple[str, tuple[BenchRow, ...]]:
    means = {each.name: [float(np.mean(times)) for times in each.times_ms] for each in field.contenders}
    agreement = {each.name: float(np.mean(np.array(each.answers) == reference)) for each in field.contenders}
    static = [each.name for each in field.contenders if field.kinds[each.name] == "base"]
    # Chance may let the composition miss the target here: then a network that does no worse is compared with.
    least = min(target, agreement.get(f"gati {field.served.engine.backend}", target))
    keep = [name for name in static if agreement[name] >= least]  # of any precision
    fastest = min(keep or static, key=lambda name: float(np.median(means[name])))
    longest: dict[str, float] = {}  # per backend, so that its histograms share one axis
    for each in field.contenders:
        most = float(np.percentile(np.concatenate(each.times_ms), 99.5))
        longest[each.engine.backend] = max(most, longest.get(each.engine.backend, 0.0))
    rows = []
    for each in field.contenders:
        own, times = means[each.name], np.concatenate(each.times_ms)
        edges = np.linspace(0.0, longest[each.engine.backend], _BINS + 1)
        same = means[f"base {each.engine.backend}"]
        answers = np.array(each.answers)
        rows.append(
            BenchRow(
                name=each.name,
                kind=field.kinds[each.name],
                backend=each.engine.backend,
                latency_ms=Latency.of(times),
                gain_same=spread([base / mine for base, mine in zip(same, own, strict=True)]),
                gain_fastest=spread([base / mine for base, mine in zip(means[fastest], own, strict=True)]),
                agreement=agreement[each.name],
                accuracy=accuracy_of(answers, inputs.labels),
                hit_rate=each.hits / len(answers),
                memory_bytes=field.weights_bytes[each.name]
                + sum(leaving.memory_bytes for leaving in each.engine.exits),
                throughput={many: spread(values) for many, values in rates[each.name].items()},
                histogram=Histogram(
                    edges_ms=tuple(edges.tolist()),
                    counts=tuple(np.histogram(np.minimum(times, edges[-1]), edges)[0].astype(float).tolist()),
                ),
                detail=field.details[each.name],
            )
        )
    return fastest, tuple(rows)


def _bytes_of(module: nn.Module) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def float32_classes(module: nn.Module, inputs: Data, device: torch.device) -> Any:
    """Return the classes [n] that the user's module predicts for `inputs`; ModelError for NaN or infinity."""

    def copied(rows: NDArray[np.int64]) -> Tensor:
        return inputs.images(rows).to(device, copy=True)

    def classes(batch: Tensor) -> Tensor:
        return check_base_outputs(module(batch)).argmax(1).cpu()

    with torch.inference_mode():
        return torch.cat(list(in_fitting_batches(len(inputs), copied, classes))).numpy()
