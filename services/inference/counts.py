"""Counters of an inference service, for its statistics and metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gati.guard.auditor import RECALL
from services.wire.gen.ttypes import ExitStatistics, Histogram

_MOST_VERSIONS = 32  # whose exits are counted

_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


@dataclass
class Seconds:
    """A histogram of seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a value."""
        self.counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def on_the_wire(self) -> Any:
        """As the wire's `Histogram`; the last count is for values above every bound."""
        return Histogram(list(_BOUNDS_S), list(self.counts), self.sum_s)


@dataclass
class Counts:
    """Counts since the service started: answered inputs, refusals by cause, exits by version, seconds."""

    inputs: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    exits: dict[str, dict[str, Any]] = field(default_factory=dict)  # `ExitStatistics` by version and exit
    queue: Seconds = field(default_factory=Seconds)
    service: Seconds = field(default_factory=Seconds)
    agreed: int = 0  # audits of early answers
    disagreed: int = 0
    trials_agreed: int = 0  # lookups of caches that do not answer yet
    trials_disagreed: int = 0
    left_out: int = 0  # audits that were drawn but not made
    recalled: int = 0  # answers from memory

    def answered(
        self,
        version: str,
        exit: str,
        queue_s: float,
        service_s: float,
        *,
        exits: Sequence[str],
        looked_up: bool = True,
    ) -> None:
        """Count an answered input; `exits` are those of the version, in forward order.

        `looked_up`: its caches were asked. Else the network alone answered.
        """
        self.inputs += 1
        self.queue.add(queue_s)
        self.service.add(service_s)
        if version not in self.exits and len(self.exits) >= _MOST_VERSIONS:
            del self.exits[next(iter(self.exits))]  # the oldest: each adds labels to the metrics
        rows = self.exits.setdefault(version, {})
        for name in exits:
            if name not in rows:
                rows[name] = ExitStatistics(version, name, 0, 0)
        if exit == RECALL:  # memory answered in place of the version
            self.recalled += 1
            return
        for name in exits if looked_up else (exit,):
            rows[name].queries += 1
            if name == exit:
                rows[name].hits += 1
                return

    def exits_on_the_wire(self) -> list[Any]:
        """For each exit of each version: how many inputs reached it and how many left there.

        The exits of an unloaded version, and of another one of that name, stay: counters must not fall.
        """
        return [copy(row) for rows in self.exits.values() for row in rows.values()]


def resident_bytes() -> int:
    """Resident memory of this process, 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    import resource

    return pages * resource.getpagesize()
