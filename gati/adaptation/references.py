"""Engines without caches: on the composition's backend, and in float32 as the reference of the promise.

The promise is agreement with the user's own network, which computes in float32. An engine of reduced
precision sometimes answers differently even without early exits, so it cannot be the reference: the float32
network answers audits, including those of misses, and all requests while caches may not answer.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from torch import Tensor

from gati.composition.engines import base_graph_file, graph_files
from gati.composition.load import OpenedModel, Served
from gati.engine.backends import BACKENDS
from gati.engine.engine import Engine

_RUNS = 9
_PRESUMED_COST = 4.0
_FASTEST = "openvino"  # in float32, about three times as fast as plain PyTorch


def is_exact(engine: Engine) -> bool:
    """Whether the engine's own network equals the reference, up to rounding."""
    return engine.precision == "f32"


def base_of(served: Served) -> Engine:
    """A new engine without caches, on the backend of the composition."""
    chosen = served.composition
    kept = base_graph_file(served.library, chosen.backend)
    return served.model.engine_of([], chosen.name, chosen.backend, (kept, kept))


def reference_of(served: Served) -> Engine:
    """A new engine without caches in float32, on the composition's backend if that computes in float32."""
    return base_of(served) if is_exact(served.engine) else open_reference(served.model)


def open_reference(model: OpenedModel) -> Engine:
    """The network of `model` without caches in float32, on the fastest backend installed."""
    if model.library is None or model.traced.device.type != "cpu" or not BACKENDS[_FASTEST].installed():
        return model.base()
    return model.engine_of([], "base", _FASTEST, graph_files(model.library, [], _FASTEST))


def reference_cost(reference: Engine, base: Engine, x: Tensor | None) -> float:
    """Latency of the reference relative to `base`, at least 1; scales the budget for audits.

    Compares medians of alternating runs on `x` [1, ...]; a fixed guess if `x` is None.
    """
    if reference is base:
        return 1.0
    if x is None:
        return _PRESUMED_COST
    taken_s: dict[int, list[float]] = {id(engine): [] for engine in (reference, base)}
    for _ in range(_RUNS):
        for engine in (reference, base):
            began_s = time.perf_counter()
            engine.base(x)
            taken_s[id(engine)].append(time.perf_counter() - began_s)
    return max(1.0, statistics.median(taken_s[id(reference)]) / statistics.median(taken_s[id(base)]))


@dataclass(frozen=True)
class Networks:
    """The engines without caches next to a composition: `base` on its backend, and the `reference`.

    `exact`: both are one. `cost` is the latency of the reference relative to `base`.
    """

    base: Engine
    reference: Engine
    exact: bool
    cost: float


def open_networks(served: Served, *, timed: bool) -> Networks:
    """Open both; the reference is warm, to be ready when caches stop. `timed`: its cost is measured."""
    base, exact = base_of(served), is_exact(served.engine)
    reference = base if exact else reference_of(served)
    example = served.engine.traced.example()[:1].clone()
    reference.base(example)
    return Networks(base, reference, exact, reference_cost(reference, base, example if timed else None))
