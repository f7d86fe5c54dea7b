"""The result of `gati bench`, as one strict JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from gati.evaluation.evaluate import Latency

__all__ = ["FORMAT", "Bench", "Kind", "LeftOut", "BenchRow", "Spread", "spread"]

FORMAT = 1
Kind = Literal["base", "gati", "peer"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over the repetitions."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class BenchRow:
    """One way to answer.

    `gain_same` and `gain_fastest` are mean base latency / own mean latency in each
    repetition: over the base model on the same backend, and over the fastest way to run it without exits.

    `agreement` is with the network as its owner gave it, in f32. `memory_bytes` counts the f32 weights of
    network and caches. `throughput` maps the number of clients to answers a second.
    """

    name: str
    kind: Kind
    backend: str
    latency_ms: Latency
    gain_same: Spread
    gain_fastest: Spread
    agreement: float
    accuracy: float | None
    hit_rate: float
    memory_bytes: int
    throughput: dict[str, Spread]
    histogram: dict[str, list[float]]  # `edges_ms`, and the `counts` between them
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A way to answer that could not be measured here, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Every way to answer, measured in turns on the same inputs in one process.

    Where `disturbed` is True the machine had other work, also when latencies were measured again: they and
    the gains are those of the moment, and `disturbance` says why.
    """

    composition: str
    accuracy_target: float
    data: str
    n: int
    repetitions: int
    clients: int
    accuracy_f32: float | None
    fastest_static: str
    rows: tuple[BenchRow, ...]
    left_out: tuple[LeftOut, ...]
    machine: dict[str, Any]
    versions: dict[str, str]
    method: dict[str, Any]
    created: str
    note: str = ""
    disturbed: bool = False
    disturbance: str = ""

    def to_json(self) -> str:
        """The result as strict JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2, allow_nan=False) + "\n"


def spread(values: list[float]) -> Spread:
    """Least, middle and largest of the repetitions."""
    return Spread(min=float(min(values)), median=float(np.median(values)), max=float(max(values)))
