"""Opens versions of a model, with engine, runner and service times."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from gati.adaptation.probe import Probe, can_probe
from gati.adaptation.references import is_exact, open_reference, reference_cost
from gati.composition.composition import Composition
from gati.composition.engines import base_graph_file, graph_kind
from gati.composition.load import Served
from gati.composition.threads import as_measured, lacking_cores
from gati.engine.cores import pin
from gati.engine.engine import Engine
from gati.engine.threads import on_threads
from gati.errors import CompositionError, ConfigError
from gati.versions.setting import Setting, graph_in
from gati.versions.stricter import stricter_settings
from services.inference.runner import Runner, open_runner
from services.inference.service_times import ServiceTimes
from services.inference.settings import InferenceSettings

if TYPE_CHECKING:
    from gati.composition.load import OpenedModel

_log = logging.getLogger("gati.inference")
_WARM_UP_INPUTS = 20

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _in_new_thread(work: Callable[_P, _T]) -> Callable[_P, _T]:
    @wraps(work)
    def done(*arguments: _P.args, **options: _P.kwargs) -> _T:
        with ThreadPoolExecutor(1, thread_name_prefix="gati-opening") as thread:
            return thread.submit(work, *arguments, **options).result()

    return done


@dataclass(frozen=True)
class Opened:
    """A version that is open and warmed up."""

    engine: Engine
    runner: Runner
    composition: Composition | None
    times: ServiceTimes
    retrained: bool
    base: Runner | None = None  # the base model alone, on the same engine: for audits and stopped caches
    base_times: ServiceTimes = field(default_factory=ServiceTimes)
    cost: float = 1.0  # of the reference, in runs of the version's own network
    settings: tuple[Setting, ...] = ()  # from strict to loose; empty if `engine` is the only one
    probe: Probe | None = None  # runs all of them
    nested: bool = False  # whatever one of them answers early, all looser ones answer in the same way


@dataclass(frozen=True)
class OpenedEngine:
    """A warm engine: the float32 network, or a setting that is opened after its version."""

    engine: Engine
    runner: Runner
    times: ServiceTimes


class Opener:
    """Opens the base model once, and versions of it.

    Call the methods from one thread; other threads may read the attributes. Each call works in a new thread,
    because torch's threads for it then end, too; if they stayed, those of the engines would be slow.
    """

    def __init__(self, settings: InferenceSettings) -> None:
        self._settings = settings
        self.model: OpenedModel | None = None
        self.reference: OpenedEngine | None = None  # for versions in reduced precision

    @_in_new_thread
    def open(self, composition: str | None, folder: Path | None) -> Opened:
        """Open and warm up a version.

        That is the published version in `folder`, or a `composition` of the library, or the base model alone
        if both are None.
        """
        torch.set_num_threads(self._settings.thread_count)
        if self.model is None:
            self.model = self._open_model()
            gc.collect()
            gc.freeze()  # torch and the base model stay: later collections need not scan them
        model = self.model
        chosen = _composition(model, composition, folder)
        self._use_threads_of(chosen)
        self._use_own_cores(chosen)
        engine = model.base() if chosen is None else _engine(model, chosen, folder)
        cost = 1.0
        if not is_exact(engine):
            example = engine.traced.example()[:1]
            cost = reference_cost(self._open_reference(model).engine, engine, example)
        with ExitStack() as if_it_fails:  # whoever follows a repository tries again and again
            if_it_fails.callback(engine.close)
            runner = self._runner(engine)
            if_it_fails.callback(runner.close)
            opened = Opened(engine, runner, chosen, _warm_up(engine, runner), folder is not None, cost=cost)
            if chosen is not None and model.library is not None:
                served = Served(engine, model, model.library, chosen)
                settings = _settings(served, folder) if can_probe(served) else ()
                probe = Probe(served, settings) if settings else None
                opened = replace(opened, settings=settings, probe=probe, nested=folder is None)
            if engine.exits and is_exact(engine):
                base = self._runner(engine, early=False)
                if_it_fails.callback(base.close)
                opened = replace(opened, base=base, base_times=_warm_up(engine, base))
            if_it_fails.pop_all()
        return opened

    @_in_new_thread
    def open_setting(self, setting: Setting) -> OpenedEngine:
        """Open and warm up a setting of an open version."""
        torch.set_num_threads(self._settings.thread_count)
        if self.model is None:
            raise AssertionError("versions are opened before their settings")
        composition, exits = setting
        self._use_threads_of(composition)
        self._use_own_cores(composition)
        engine = self.model.engine_of(
            exits, composition.name, composition.backend, lookup_cores=composition.lookup_cores
        )
        return self._opened(engine)

    def _use_threads_of(self, chosen: Composition | None) -> None:
        """Where one request runs at a time, use as many threads as its latencies were measured with.

        Otherwise each worker has one thread. The configuration's number, or this process's part of the cores,
        comes first.
        """
        settings, model, count = self._settings, self.model, self._settings.thread_count
        if chosen is None or model is None or (settings.workers != 1 and chosen.placement != "overlapped"):
            return
        if lacking := lacking_cores(chosen, model.traced.device.type, part=count):
            _log.warning("%s", lacking, extra={"model": settings.name, "composition": chosen.name})
        measured = as_measured(chosen.measured_on, model.traced.device.type) or count
        if measured < count and not settings.keeps_threads:
            torch.set_num_threads(measured)
        elif measured != count:
            _log.warning(
                "the latencies of this composition were measured with threads=%d, but requests run on %d: "
                "set threads of the model to %d, or compose with --threads %d",
                *(measured, count, measured, count),
                extra={"model": settings.name, "composition": chosen.name},
            )

    def _use_own_cores(self, chosen: Composition | None) -> None:
        """Keep this thread, and those that it starts, to the replica's own cores if lookups reserve some.

        Lookups get the last of the cores that their thread may use: else all replicas would use the same.
        """
        settings = self._settings
        if chosen is None or chosen.placement != "overlapped" or settings.cores is None:
            return
        if settings.thread_count <= len(settings.cores):
            pin(set(settings.cores))

    def _open_reference(self, model: OpenedModel) -> OpenedEngine:
        if self.reference is None:
            settings = self._settings
            count = torch.get_num_threads() if settings.workers == 1 else settings.thread_count
            with on_threads(count):
                self.reference = self._opened(open_reference(model), early=False)
        return self.reference

    def _opened(self, engine: Engine, *, early: bool = True) -> OpenedEngine:
        runner = self._runner(engine, early=early)
        return OpenedEngine(engine, runner, _warm_up(engine, runner))

    def _runner(self, engine: Engine, *, early: bool = True) -> Runner:
        """A runner; several workers are as many as this process has cores, whatever a version runs on."""
        workers = self._settings.workers
        if workers == 1 or (early and engine.overlapped):
            return open_runner(engine, early=early, workers=workers)
        with on_threads(self._settings.thread_count):
            return open_runner(engine, early=early, workers=workers)

    def _open_model(self) -> OpenedModel:
        from gati.composition.load import open_model, open_plain_model

        settings = self._settings
        if settings.library is not None:
            return open_model(settings.library, device=settings.device, threads=settings.thread_count)
        if settings.model is None:
            raise ConfigError(f"model '{settings.name}' has neither a library nor a model")
        return open_plain_model(
            settings.model,
            settings.checkpoint,
            size=settings.height_and_width,
            device=settings.device or "cpu",
            threads=settings.thread_count,
        )


def _engine(model: OpenedModel, chosen: Composition, folder: Path | None) -> Engine:
    """An engine for a composition of the library, or the published version in `folder`."""
    if folder is None:
        return model.engine(chosen)
    kept, kind = graph_in(folder, chosen.backend), graph_kind(chosen.backend)
    if model.library is None or kind is None or not kind.calibrated or not kept.is_file():
        return model.engine(chosen, folder / "caches")
    # It cannot be made here, where calibration inputs may be missing.
    graphs = kept, base_graph_file(model.library, chosen.backend)
    exits = model.exits(chosen, folder / "caches")
    return model.engine_of(exits, chosen.name, chosen.backend, graphs, chosen.lookup_cores)


def _settings(served: Served, folder: Path | None) -> tuple[Setting, ...]:
    """The settings of the published version in `folder`, or of a composition of the library."""
    if folder is None:
        return stricter_settings(served)
    from gati.versions.engines import open_settings  # slow: brings in onnx

    return open_settings(served, folder)


def _composition(model: OpenedModel, composition: str | None, folder: Path | None) -> Composition | None:
    if folder is not None:
        return Composition.load(folder / "composition.json")
    if composition is None:
        return None
    if model.library is None:
        raise CompositionError("a plain model has no compositions; explore it to make a cache library")
    return Composition.of(model.library, composition)


def _warm_up(engine: Engine, runner: Runner) -> ServiceTimes:
    """Warm up a runner on the example inputs; returns the service times of the second half."""
    times = ServiceTimes()
    with torch.inference_mode():
        examples = engine.examples()
    for number in range(_WARM_UP_INPUTS):
        began_s = time.perf_counter()
        runner.submit(examples[number % len(examples)]).result()
        if number >= _WARM_UP_INPUTS // 2:
            times.add(time.perf_counter() - began_s, running=1.0)
    return times
