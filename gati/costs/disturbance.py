"""Whether a measurement shows the network, or other work on the machine at the same time.

Three signs are looked for in each round of a measurement; each may come without the others.

- The thread that measures could have run and had no core: more than a tenth of the time, as Linux counts it.
  It is the surest sign where another program takes the same share all the time, which slows every request
  alike.
- Requests that do the same work take very different times: their mean is a quarter above their median. Pauses
  of the whole machine, which its operating system cannot see, show in this way.
- The base model took a quarter more time, at its median, than in the best round.

Disturbed rounds are measured again after the others, when the machine may be quiet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Generic, TypeVar

_WAITING = 0.1  # of the time
_SPIKES = 1.25  # mean over median of like requests
_DRIFT = 1.25  # over the best round
_ENOUGH = 5  # requests that did the same work, for their median to mean anything
_SCHEDSTAT = Path("/proc/thread-self/schedstat")

T = TypeVar("T")
Alike = Sequence[Sequence[float]]


class Machine:
    """The clocks that measurements read."""

    def now_ns(self) -> int:
        """A time that only goes forward."""
        return time.perf_counter_ns()

    def waited_ns(self) -> int | None:
        """How long the calling thread was ready to run and had no core; None if not counted."""
        try:
            return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1])
        except (OSError, IndexError, ValueError):
            return None


class Uncounted(Machine):
    """For systems that do not count how long a thread waits: only the other two signs are used."""

    def waited_ns(self) -> int | None:
        """Never known."""
        return None


MACHINE = Machine()


@dataclass(frozen=True)
class MeasuringRound(Generic[T]):
    """What one round found; `alike` are times of requests that did the same work, the base model's first."""

    found: T
    alike: Alike
    waiting: float  # share of the round in which the calling thread had no core

    @property
    def base_ms(self) -> float:
        """The base model's median."""
        return median(self.alike[0]) if self.alike and self.alike[0] else 0.0

    def why(self, best_ms: float) -> str:
        """What disturbed it, empty if nothing did; `best_ms` is the base model's time in the best round."""
        if self.waiting > _WAITING:
            return f"other programs had the processor for {self.waiting:.0%} of the time"
        if (ratio := spikes(self.alike)) > _SPIKES:
            return f"requests that do the same work took {ratio:.2f} times their median"
        if len(self.alike[0]) >= _ENOUGH and self.base_ms > _DRIFT * best_ms:
            return f"the base model took {self.base_ms / best_ms:.2f} times as long as in the best round"
        return ""


@dataclass(frozen=True)
class Steady(Generic[T]):
    """The rounds in their order; `disturbed` of them stayed so, the first of them for that reason."""

    rounds: tuple[T, ...]
    disturbed: int
    reason: str

    @property
    def note(self) -> str:
        """One line for the reader, empty if nothing was disturbed."""
        if not self.disturbed:
            return ""
        several = f"{self.disturbed} of {len(self.rounds)} rounds"
        what = "the measurement" if len(self.rounds) == 1 else several
        return f"{what} stayed disturbed ({self.reason})"


def spikes(alike: Alike) -> float:
    """Mean of all times over the median of those that are alike; 1 where there are too few to tell."""
    relative = [each / median(times) for times in alike if len(times) >= _ENOUGH for each in times]
    return mean(relative) if relative else 1.0


def measure_steadily(
    rounds: Sequence[Callable[[], T]],
    alike: Callable[[T], Alike],
    *,
    machine: Machine = MACHINE,
    passes: int = 3,
) -> Steady[T]:
    """Measure every round, then repeat disturbed ones while that helps, at most `passes` times in all.

    `alike` gives the times of what a round found, see `MeasuringRound`. Of a round that stays disturbed the
    last measurement is kept.
    """
    kept = [_measured(each, alike, machine) for each in rounds]
    reasons = _reasons(kept)
    for _ in range(passes - 1):
        again = [index for index, reason in enumerate(reasons) if reason]
        if not again:
            break
        for index in again:
            kept[index] = _measured(rounds[index], alike, machine)
        reasons = _reasons(kept)
        if sum(map(bool, reasons)) >= len(again) > 1:
            break  # it is no passing moment
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
