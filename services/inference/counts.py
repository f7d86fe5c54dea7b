"""Counters of an inference service, for its statistics and metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gati.engine.exits import BASE
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
    exits: dict[str, Counter[str]] = field(default_factory=dict)
    not_looked_up: Counter[str] = field(default_factory=Counter)  # by version: the network answered at once
    queue: Seconds = field(default_factory=Seconds)
    service: Seconds = field(default_factory=Seconds)
    agreed: int = 0  # audits of early answers
    disagreed: int = 0
    trials_agreed: int = 0  # lookups of caches that do not answer yet
    trials_disagreed: int = 0
    left_out: int = 0  # audits that were drawn but not made
    recalled: int = 0  # answers from memory
    _order: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of exits, also after unloading

    def answered(
        self, version: str, exit: str, queue_s: float, service_s: float, *, looked_up: bool = True
    ) -> None:
        """Count an answered input; `looked_up`: by the version's caches."""
        self.inputs += 1
        self.recalled += exit == RECALL
        if version not in self.exits and len(self.exits) >= _MOST_VERSIONS:
            oldest = next(iter(self.exits))  # each adds labels to the metrics
            del self.exits[oldest], self.not_looked_up[oldest]
            self._order.pop(oldest, None)
        self.exits.setdefault(version, Counter())[exit] += 1
        self.not_looked_up[version] += exit != RECALL and not looked_up
        self.queue.add(queue_s)
        self.service.add(service_s)

    def exits_on_the_wire(self, order: dict[str, tuple[str, ...]]) -> list[Any]:
        """For each exit of each version, in order: how many inputs reached it and how many left there.

        `order` is that of loaded versions; it is remembered, so that counters do not fall when one leaves.
        """
        self._order.update((name, exits) for name, exits in order.items() if name in self.exits)
        rows = []
        for version, left in self.exits.items():
            # memory answers in place of the version, and the network alone has no lookups
            came = left.total() - left[RECALL] - self.not_looked_up[version]
            for name in self._order.get(version, tuple(each for each in left if each != RECALL)):
                came += self.not_looked_up[version] if name == BASE else 0
                rows.append(ExitStatistics(version, name, came, left[name]))
                came -= left[name]
        return rows


def resident_bytes() -> int:
    """Resident memory of this process, 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    import resource

    return pages * resource.getpagesize()
