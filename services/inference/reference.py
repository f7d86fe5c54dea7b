"""The network that agreement is about, where a version computes in reduced precision.

A certificate of a version in bfloat16 or 8 bits is about the float32 network. So that network answers audits,
those of misses included, and everything while the caches may not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from gati.compose.engines import graph_files
from gati.runtime.backends import BACKENDS
from gati.runtime.engine import Engine
from gati.runtime.load import OpenedModel

__all__ = ["is_exact", "open_reference", "relative_cost"]

_TIMED = 7
_FASTEST = "openvino"


def is_exact(engine: Engine) -> bool:
    """Whether the engine's own network answers as the user's does."""
    return engine.precision == "f32"


def open_reference(model: OpenedModel) -> Engine:
    """The network of `model` without caches in float32, on the fastest backend installed. BackendError."""
    if model.library is None or model.traced.device.type != "cpu" or not BACKENDS[_FASTEST].installed():
        return model.base()
    return model.engine_of([], "base", _FASTEST, graph_files(model.library, [], _FASTEST))


def relative_cost(reference: Engine, engine: Engine) -> float:
    """How many times as long the reference takes as the engine's own network; medians, at least 1."""
    with torch.inference_mode():
        x = engine.traced.example()[:1]

    def median_s(answer: Callable[[torch.Tensor], object]) -> float:
        answer(x)
        taken = []
        for _ in range(_TIMED):
            began_s = time.perf_counter()
            answer(x)
            taken.append(time.perf_counter() - began_s)
        return statistics.median(taken)

    return max(1.0, median_s(reference.base) / max(1e-9, median_s(engine.base)))
