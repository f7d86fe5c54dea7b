"""The result of `gati bench`, as one strict JSON document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from gati.documents import DocumentKind, values_of
from gati.errors import LibraryError
from gati.evaluation.evaluate import Latency

_KIND = DocumentKind(1, LibraryError, "run gati bench again")
Kind = Literal["base", "gati", "peer"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The spread of a figure over repetitions."""

    min: float
    median: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """A histogram of request latencies: `counts[i]` falls between `edges_ms[i]` and `edges_ms[i + 1]`."""

    edges_ms: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True)
class BenchRow:
    """One way to answer requests.

    `gain_same` and `gain_fastest` are mean base latency / own mean latency, per repetition: against the base
    model on the same backend, and against `Bench.fastest_static`.

    `agreement` is with the user's original f32 network. `memory_bytes` counts the f32 weights of network and
    caches. `throughput` maps the number of clients to answers per second.
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
    histogram: Histogram
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A method that could not be measured here, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class BenchMachine:
    """The machine of a benchmark; `threads` is torch's thread count."""

    cpu: str
    cores: int | None
    threads: int
    system: str
    load_average: tuple[float, ...]
    gpu: str | None = None  # if the composition's backend uses one


@dataclass(frozen=True, kw_only=True)
class BenchMethod:
    """How a benchmark was run, in words and numbers."""

    text: str
    warm_up_requests: int
    throughput_seconds: float


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Every way to answer, measured in turns on the same inputs in one process.

    `fastest_static` is the name of the fastest way to run the base model without exits whose agreement is at
    least the composition's target, or that of the composition on its own backend if it is lower; the fastest
    of all if none is.

    If `disturbed`, the machine was busy with other work even when latencies were measured again: latencies
    and gains are unreliable, and `disturbance` says why.
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
    machine: BenchMachine
    versions: dict[str, str]
    method: BenchMethod
    created: str
    note: str = ""
    disturbed: bool = False
    disturbance: str = ""
    composed: str = ""  # `created` of the composition

    @property
    def fastest_words(self) -> str:
        """What `fastest_static` is, in words: whether its agreement is at least the target, and its name."""
        name, target = self.fastest_static, f"the target of {100 * self.accuracy_target:g} %"
        if any(row.name == name and row.agreement >= self.accuracy_target for row in self.rows):
            return f"fastest network alone that keeps {target}: {name}"
        return f"fastest network alone: {name}, whose agreement is below {target}"

    def to_json(self) -> str:
        """The result as strict JSON text."""
        return _KIND.text_of(values_of(self))

    @classmethod
    def load(cls, path: Path) -> Bench:
        """Read what `to_json` wrote. Raises LibraryError."""
        return _KIND.record(cls, _KIND.read(path), str(path))


def spread(values: list[float]) -> Spread:
    """Return the minimum, median and maximum over repetitions."""
    return Spread(min=float(min(values)), median=float(np.median(values)), max=float(max(values)))
