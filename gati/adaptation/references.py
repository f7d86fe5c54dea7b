"""The network without caches: as the composition's backend runs it, and as the promise means it.

What is promised is agreement with the user's own network, which computes in float32. An engine of reduced
precision answers otherwise now and then even where nothing leaves early, so its own network is no reference:
the float32 network answers audits, those of misses included, and everything while caches may not.
"""

from __future__ import annotations

import statistics
import time

from torch import Tensor

from gati.composition.engines import graph_files
from gati.composition.load import OpenedModel, Served
from gati.engine.backends import BACKENDS
from gati.engine.engine import Engine

_RUNS = 9
_PRESUMED_COST = 4.0
_FASTEST = "openvino"  # in float32 it takes a third of the time of plain PyTorch


def is_exact(engine: Engine) -> bool:
    """Whether the engine's own network is the reference, but for rounding."""
    return engine.precision == "f32"


def base_of(served: Served) -> Engine:
    """A new engine without caches, on the backend of the composition."""
    chosen = served.composition
    kept = graph_files(served.library, [], chosen.backend)[1]
    return served.model.engine_of([], chosen.name, chosen.backend, (kept, kept))


def reference_of(served: Served) -> Engine:
    """A new engine without caches that computes in float32: on the composition's backend where it does."""
    return base_of(served) if is_exact(served.engine) else open_reference(served.model)


def open_reference(model: OpenedModel) -> Engine:
    """The network of `model` without caches in float32, on the fastest backend installed."""
    if model.library is None or model.traced.device.type != "cpu" or not BACKENDS[_FASTEST].installed():
        return model.base()
    return model.engine_of([], "base", _FASTEST, graph_files(model.library, [], _FASTEST))


def reference_cost(reference: Engine, base: Engine, x: Tensor | None) -> float:
    """How many times as long as `base` the reference takes, at least 1: the budget for audits is in its time.

    Medians of runs on `x` [1, ...] by turns; presumed where that is None.
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
