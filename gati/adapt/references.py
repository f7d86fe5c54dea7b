"""The network without caches: as the composition's backend runs it, and as the promise means it.

What is promised is agreement with the user's own network, which computes in float32. An engine of reduced
precision answers otherwise now and then even where nothing leaves early, so its own network is no reference.
"""

from __future__ import annotations

import statistics
import time

from torch import Tensor

from gati.compose.engines import graph_files
from gati.runtime.backends import BACKENDS, GraphBackend
from gati.runtime.engine import Engine
from gati.runtime.load import Served

__all__ = ["base_of", "is_exact", "reference_cost", "reference_of"]

_RUNS = 9
_PRESUMED_COST = 4.0


def is_exact(served: Served) -> bool:
    """Whether the engine's own network is the reference, but for rounding."""
    return BACKENDS[served.composition.backend].precision == "f32"


def base_of(served: Served) -> Engine:
    """A new engine without caches, on the backend of the composition."""
    return _without_caches(served, served.composition.backend)


def reference_of(served: Served) -> Engine:
    """A new engine without caches that computes in float32: on that backend where it does, else the fastest.

    Graph backends come first: in float32 they take a third of the time of plain PyTorch.
    """
    if is_exact(served):
        return base_of(served)
    precise = [
        name
        for name, kind in BACKENDS.items()
        if kind.precision == "f32" and issubclass(kind, GraphBackend) and kind.installed()
    ]
    return _without_caches(served, "openvino" if "openvino" in precise else (*precise, "torch")[0])


def reference_cost(reference: Engine, base: Engine, x: Tensor | None) -> float:
    """How many times as long as `base` the reference takes; measured on `x` [1, ...], else presumed."""
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


def _without_caches(served: Served, backend: str) -> Engine:
    kept = graph_files(served.library, [], backend)[1]
    return served.model.engine_of([], served.composition.name, backend, (kept, kept))
