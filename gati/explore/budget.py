"""How much of an exploration's time is left, and how fast training goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from gati.explore.schedule import Pace
from gati.explore.state import RunState

__all__ = ["Budget", "Clock", "measure_pace"]

Clock = Callable[[], float]

_WARM_UP, _TIMED = 2, 4  # steps


class Budget:
    """Seconds of wall clock from `began` on, those of earlier runs that were interrupted included.

    `budget_s` None never ends.
    """

    def __init__(self, budget_s: float | None, clock: Clock, began: float, state: RunState) -> None:
        self.budget_s, self.clock, self._state = budget_s, clock, state
        self._began = began - state.spent_s

    @property
    def spent_s(self) -> float:
        """Used so far."""
        return self.clock() - self._began

    def left_s(self, reserved_s: float = 0.0) -> float | None:
        """What is left when so much is kept free, at least 0; None without a budget."""
        return None if self.budget_s is None else max(0.0, self.budget_s - self.spent_s - reserved_s)

    def note(self) -> None:
        """Write down how much is used, for the run that goes on if this one is interrupted."""
        self._state.write_spent(self.spent_s)


def measure_pace(
    probe: Callable[[int, int | None], Iterator[float]], rounds: int | None, places: int, clock: Clock
) -> Pace:
    """Measure seconds a step on a training that is thrown away.

    `probe(batches, rounds)` runs one on so many batches of inputs, step by step: once over them, or twice
    where views come round again after `rounds` of `places` batches. Then nothing waits for the base model, as
    its answers are known by then.
    """
    batches = _WARM_UP + _TIMED
    times = _times(probe(batches, None if rounds is None else 1), clock)
    first = times[:batches]
    first_s = median(first[min(_WARM_UP, len(first) - 1) :])
    later = times[batches:]
    if rounds is None or not later:
        return Pace(first_s)
    return Pace(median(later), first_s, max(1, places) * rounds)


def _times(steps: Iterator[float], clock: Clock) -> list[float]:
    times, before = [], clock()
    for _ in steps:
        now = clock()
        times.append(now - before)
        before = now
    return times
