"""Tells the user that other programs use the processor while caches are trained.

Training on several cores waits for the slowest thread at every operation. So even a program of the lowest
priority can slow it many times, and the caches would be worse without any other sign.
"""

from __future__ import annotations

from collections.abc import Callable

from gati.costs.disturbance import MACHINE, Machine
from gati.exploration.progress import Progress

_EVERY_S = 20.0
# Seconds that all threads together waited for a core, per second. With nothing else running, the threads of
# training and of the engine for base answers wait for each other for 0.1 s; next to one program of the lowest
# priority on two cores it was 0.55 s.
_CROWDED = 0.25


class Crowding:
    """Watches a training of `total_steps` steps: `look` after each step, `end` after the last."""

    def __init__(
        self,
        name: str,
        total_steps: int,
        progress: Progress,
        clock: Callable[[], float],
        machine: Machine = MACHINE,
    ) -> None:
        self._name, self._total_steps, self._progress = name, total_steps, progress
        self._clock, self._machine = clock, machine
        self._since_s, self._waited_ns = clock(), machine.all_waited_ns()
        self._told = False

    def look(self) -> None:
        """Every 20 seconds, see how long threads have waited for a core; tell it once if that is long."""
        passed_s = self._clock() - self._since_s
        if self._told or passed_s < _EVERY_S:
            return
        before_ns, self._waited_ns = self._waited_ns, self._machine.all_waited_ns()
        self._since_s += passed_s
        if before_ns is None or self._waited_ns is None:
            return
        waiting = (self._waited_ns - before_ns) / 1e9 / passed_s
        if waiting >= _CROWDED:
            self._told = True
            self._progress.note(
                f"{self._name}: threads waited for a core for {waiting:.2f} s in a second. Stop other "
                "programs for better caches: even at the lowest priority they can slow training many times"
            )

    def end(self, step: int) -> None:
        """Tell how many steps were done, if not all."""
        if step < self._total_steps:
            self._progress.note(f"{self._name}: {step} of {self._total_steps} steps were done in the time")
