"""How fast the plain network is on every engine that starts within seconds, for `gati doctor`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from torch import Tensor

from gati.engine.backends import BACKENDS, Backend, GraphBackend
from gati.engine.engine import Engine
from gati.errors import GatiError, one_line
from gati.evaluation.diagnosis import EngineSpeed
from gati.evaluation.timing import WARM_UP_REQUESTS, BenchEntry, measure_latency
from gati.model.segments import TracedModel
from gati.types import OutputsKind

_MOST_REQUESTS, _LEAST_REQUESTS = 10, 2  # per engine
_RUNS = 4  # of each request: warm-up and repetitions


def engine_speeds(
    traced: TracedModel,
    example: Tensor,
    kind: OutputsKind,
    answer_s: float,
    within_s: float,
    is_late: Callable[[], bool],
) -> tuple[tuple[EngineSpeed, ...], str]:
    """Time the network on all engines in turns; return also what disturbed the measurement, or "".

    `example` are inputs [n, ...], each of which takes torch about `answer_s`. A slow network answers fewer of
    them, so that timing takes about `within_s`. Once `is_late`, no further engine is started.
    """
    with TemporaryDirectory() as folder:
        ready, reasons = _started(traced, example, kind, is_late, Path(folder))
        fitting = within_s / (_RUNS * max(1, len(ready)) * max(answer_s, 1e-9))
        requests = int(min(max(fitting, _LEAST_REQUESTS), _MOST_REQUESTS))
        warm_up = WARM_UP_REQUESTS if requests == _MOST_REQUESTS else requests

        def request(index: int) -> Tensor:
            return example[index % len(example)][None]

        steady = measure_latency(ready, request, requests, 1, warm_up=warm_up)
    base_ms = {entry.name: float(np.median(entry.times_ms[0])) for entry in ready}
    return tuple(
        EngineSpeed(name=name, precision=BACKENDS[name].precision, base_ms=base_ms.get(name), reason=reason)
        for name, reason in reasons.items()
    ), steady.note


def _started(
    traced: TracedModel, example: Tensor, kind: OutputsKind, is_late: Callable[[], bool], folder: Path
) -> tuple[list[BenchEntry], dict[str, str]]:
    """The engines that have answered a request, and for every one why it has not, or ""."""
    ready: list[BenchEntry] = []
    reasons: dict[str, str] = {}
    for name, backend in BACKENDS.items():
        if backend.same_network_as is not None:
            continue  # runs the same network as another engine
        reasons[name] = _why_not(backend)
        if not reasons[name] and ready and is_late():
            reasons[name] = "out of time; gati bench measures all engines"
        if reasons[name]:
            continue
        try:
            ready.append(_without_exits(traced, example, kind, name, folder))
        except GatiError as error:
            reasons[name] = str(error)
        except Exception as error:  # engines raise many types for networks that they cannot run
            reasons[name] = f"cannot run this network ({one_line(error)})"
    return ready, reasons


def _without_exits(
    traced: TracedModel, example: Tensor, kind: OutputsKind, name: str, folder: Path
) -> BenchEntry:
    backend = BACKENDS[name]
    kept = folder / backend.stored_as if issubclass(backend, GraphBackend) else None  # converted only once
    graphs = None if kept is None else (kept, kept)
    engine = Engine(traced, outputs_kind=kind, backend=name, graphs=graphs)
    entry = BenchEntry(name, engine, early=True)  # without exits, this is the whole network
    entry.answer(example[:1].clone())  # some engines fail only when they run
    engine.close()
    return entry


def _why_not(backend: type[Backend]) -> str:
    """Return why an engine is not timed here, or "" if it is."""
    if "cpu" not in backend.devices:
        return "needs a CUDA device: explore with --device cuda"
    if backend.name != "torch" and "cpu" not in backend.automatic:
        return "slow to start; gati bench measures it"
    if issubclass(backend, GraphBackend) and backend.calibrated:
        return "needs calibration on held-out inputs; gati compose does that"
    return ""
