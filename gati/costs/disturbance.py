"""Detect whether other work on the machine disturbed a measurement.

Each round of a measurement is checked for three independent signs.

- The measuring thread was runnable but had no core for more than a tenth of the time, as counted by Linux.
  This is the most reliable sign if another program uses a constant share and slows every request equally.
- Requests that do the same work take very different times: their mean is more than a quarter above their
  median. This reveals pauses of the whole machine, which its operating system cannot see.
- The base model's median time is more than a quarter above that of the best round.

Disturbed rounds are measured again after the others, when the machine may be quiet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Generic, TypeVar

from gati.units import percent

_WAITING = 0.1  # share of the time
_SPIKES = 1.25  # mean / median of requests that do the same work
_DRIFT = 1.25  # relative to the best round
_ENOUGH = 5  # fewest requests that do the same work for a meaningful median
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_THREADS = Path("/proc/self/task")

T = TypeVar("T")
Alike = Sequence[Sequence[float]]


class Machine:
    """The clocks for measurements."""

    def now_ns(self) -> int:
        """Return a monotonic time."""
        return time.perf_counter_ns()

    def waited_ns(self) -> int | None:
        """Return how long the calling thread has waited for a core in total; None if not counted."""
        return _waited_ns(_SCHEDSTAT)

    def all_waited_ns(self) -> int | None:
        """Return how long all threads of this process have waited for a core; None if not counted."""
        waited = [_waited_ns(each) for each in _THREADS.glob("*/schedstat")]
        counted = [each for each in waited if each is not None]
        return sum(counted) if counted else None


class Uncounted(Machine):
    """A machine that does not count waiting time: only the other two signs are used."""

    def waited_ns(self) -> int | None:
        """Return None: not counted."""
        return None

    def all_waited_ns(self) -> int | None:
        """Return None: not counted."""
        return None


def _waited_ns(schedstat: Path) -> int | None:
    try:
        return int(schedstat.read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):  # no such system, or the thread has ended
        return None


MACHINE = Machine()


@dataclass(frozen=True)
class MeasuringRound(Generic[T]):
    """Result of one round; `alike` groups times of requests that did the same work, base model first."""

    found: T
    alike: Alike
    waiting: float  # share of the round in which the calling thread waited for a core

    @property
    def base_ms(self) -> float:
        """The base model's median time."""
        return median(self.alike[0]) if self.alike and self.alike[0] else 0.0

    def why(self, best_ms: float) -> str:
        """Return what disturbed the round, or ""; `best_ms` is the base model's time in the best round."""
        if self.waiting > _WAITING:
            return f"other programs used the processor for {percent(self.waiting, 0)} of the time"
        if (ratio := spikes(self.alike)) > _SPIKES:
            return f"requests that do the same work took {ratio:.2f} times their median on average"
        if len(self.alike[0]) >= _ENOUGH and self.base_ms > _DRIFT * best_ms:
            return f"the base model took {self.base_ms / best_ms:.2f} times as long as in the best round"
        return ""


@dataclass(frozen=True)
class Steady(Generic[T]):
    """Results of the rounds in order; how many stayed disturbed, and the `reason` of the first of these."""

    rounds: tuple[T, ...]
    disturbed: int
    reason: str

    @property
    def note(self) -> str:
        """One line for the user; empty if nothing was disturbed."""
        if not self.disturbed:
            return ""
        several = f"{self.disturbed} of {len(self.rounds)} rounds"
        what = "the measurement" if len(self.rounds) == 1 else several
        return f"{what} stayed disturbed ({self.reason})"


def spikes(alike: Alike) -> float:
    """Return the mean ratio of a time to the median of its group; 1 if all groups are too small."""
    relative = [each / median(times) for times in alike if len(times) >= _ENOUGH for each in times]
    return mean(relative) if relative else 1.0


def measure_steadily(
    rounds: Sequence[Callable[[], T]],
    alike: Callable[[T], Alike],
    *,
    machine: Machine = MACHINE,
    passes: int = 3,
    enough_s: float = inf,
) -> Steady[T]:
    """Measure every round, then repeat disturbed ones while that helps, in at most `passes` passes.

    No pass begins after `enough_s` seconds. `alike` returns the times in the result of a round, see
    `MeasuringRound`. If a round stays disturbed, its last measurement is kept.
    """
    began_ns = machine.now_ns()
    kept = [_measured(each, alike, machine) for each in rounds]
    reasons = _reasons(kept)
    for _ in range(passes - 1):
        again = [index for index, reason in enumerate(reasons) if reason]
        if not again or machine.now_ns() - began_ns > enough_s * 1e9:
            break
        for index in again:
            kept[index] = _measured(rounds[index], alike, machine)
        reasons = _reasons(kept)
        if sum(map(bool, reasons)) >= len(again) > 1:
            break  # not a transient disturbance
    left = [reason for reason in reasons if reason]
    return Steady(tuple(each.found for each in kept), len(left), left[0] if left else "")


def _measured(measure: Callable[[], T], alike: Callable[[T], Alike], machine: Machine) -> MeasuringRound[T]:
    began_ns, before_ns = machine.now_ns(), machine.waited_ns()
    found = measure()
    after_ns, ended_ns = machine.waited_ns(), machine.now_ns()
    waited_ns = 0 if before_ns is None or after_ns is None else after_ns - before_ns
    return MeasuringRound(found, alike(found), waited_ns / max(1, ended_ns - began_ns))


def _reasons(kept: Sequence[MeasuringRound[T]]) -> list[str]:
    best_ms = min((each.base_ms for each in kept if len(each.alike[0]) >= _ENOUGH), default=0.0)
    return [each.why(best_ms) for each in kept]
