"""Tells the user that training is slower than planned, and whether other programs are the cause.

Training on several cores waits for the slowest thread at every operation. So even a program at the lowest
priority can slow it many times, and the caches will be worse without any other sign.
"""

from __future__ import annotations

from collections.abc import Callable

from gati.costs.disturbance import MACHINE, Machine
from gati.exploration.progress import Progress
from gati.exploration.train import LATENESS

_LEAST_S = 20.0  # after which a lag is no accident of the first steps
_WAITING = 0.05  # seconds that all threads together waited for a core, per second


class Lagging:
    """Watches one training of `total_steps` steps; tells of its first lag, once, and of an early end."""

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
        self._began_s, self._waited_ns = clock(), machine.all_waited_ns()
        self._told = False

    def look(self, step: int, share_due: float) -> None:
        """Compare the steps done with the share of them that should be done by now."""
        passed_s = self._clock() - self._began_s
        if self._told or passed_s < _LEAST_S or step / self._total_steps >= share_due - LATENESS:
            return
        self._told = True
        due = min(self._total_steps, round(share_due * self._total_steps))
        self._progress.note(f"{self._name}: {step} steps done instead of {due}: {self._reason(passed_s)}")

    def end(self, step: int) -> None:
        """Tell how many steps were done, if not all."""
        if step < self._total_steps:
            self._progress.note(f"{self._name}: {step} of {self._total_steps} steps were done in the time")

    def _reason(self, passed_s: float) -> str:
        waited_ns = self._machine.all_waited_ns()
        if waited_ns is None or self._waited_ns is None:
            return "the machine is slower than when they were planned"
        waiting = (waited_ns - self._waited_ns) / 1e9 / passed_s
        if waiting < _WAITING:
            return "the machine is slower than when they were planned (threads hardly waited for a core)"
        return (
            f"threads waited for a core for {waiting:.2f} s in a second. Stop other programs for better "
            "caches: even at the lowest priority they can slow training many times"
        )
