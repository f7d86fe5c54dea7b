"""Training next to other programs: tells the user of them, and uses fewer threads where that is faster.

On several cores, every operation waits for the slowest thread, and the others spin meanwhile. So a program
that keeps one of two cores busy makes training on both four times slower, but on a single thread less than
twice. A program of lower priority may slow it little, or many times. So numbers of threads are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gati.costs.disturbance import MACHINE, Machine
from gati.exploration.pace import LATENESS
from gati.exploration.progress import Progress

_EVERY_S = 20.0
_TRIED_S = 5.0
_LEAST_STEPS = 4  # in the time in which a number of threads is tried
_FASTER = 1.05
_AGAIN_S, _SELDOM_S = 20.0, 600.0  # after a number that was no faster, the next one waits twice as long
# Seconds that all threads together waited for a core, per second. With nothing else running, the threads of
# training and of the engine for base answers wait for each other for 0.1 s; next to one program of the lowest
# priority on two cores it was 0.55 s.
CROWDED = 0.25


def crowding_since(clock: Callable[[], float], machine: Machine = MACHINE) -> Callable[[], float]:
    """Return what tells how long threads have waited for a core since now, in seconds a second.

    It is 0 where the system does not count that.
    """
    began_s, before_ns = clock(), machine.all_waited_ns()

    def waiting() -> float:
        passed_s, now_ns = clock() - began_s, machine.all_waited_ns()
        if before_ns is None or now_ns is None or passed_s <= 0:
            return 0.0
        return (now_ns - before_ns) / 1e9 / passed_s

    return waiting


class Crowding:
    """Watches a training of `total_steps` steps: `look` after each step, `end` after the last.

    `use_threads` sets the number of threads, of which there are `most` at the beginning and at the most.
    """

    def __init__(
        self,
        name: str,
        total_steps: int,
        progress: Progress,
        clock: Callable[[], float],
        machine: Machine = MACHINE,
        *,
        most: int = 1,
        use_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._name, self._total_steps, self._progress = name, total_steps, progress
        self._clock, self._machine = clock, machine
        self._most, self._use_threads = most, use_threads
        self._threads = most
        self._tried: int | None = None  # the number in use on trial; `_threads` is what it is compared with
        self._speed = 0.0  # of `_threads`, in steps a second
        self._rest_s, self._try_from_s = _AGAIN_S, -math.inf
        self._told = False
        self._begin()

    def look(self) -> None:
        """See from time to time how long threads have waited for a core, and how fast training is."""
        self._steps += 1
        passed_s = self._clock() - self._since_s
        if passed_s < (_EVERY_S if self._tried is None else _TRIED_S):
            return
        if self._tried is not None:
            if self._steps >= _LEAST_STEPS:
                self._judge(self._steps / passed_s)
            return
        waiting, speed = self._waiting(), self._steps / passed_s
        self._begin()
        crowded = waiting >= CROWDED
        if crowded and not self._told:
            self._told = True
            self._progress.note(
                f"{self._name}: threads waited for a core for {waiting:.2f} s in a second. Stop other "
                "programs for better caches: even at the lowest priority they can slow training many times"
            )
        others = max(1, self._threads // 2) if crowded else min(self._most, 2 * self._threads)
        if others != self._threads and self._clock() >= self._try_from_s:
            self._tried, self._speed = others, speed
            self._use_threads(others)

    def end(self, step: int) -> None:
        """Tell how many steps were done, if clearly fewer than planned."""
        if step < (1.0 - LATENESS) * self._total_steps:
            self._progress.note(f"{self._name}: {step} of {self._total_steps} steps were done in the time")

    def _begin(self) -> None:
        self._steps, self._since_s = 0, self._clock()
        self._waiting = crowding_since(self._clock, self._machine)

    def _judge(self, speed: float) -> None:
        """Keep the number that was tried if it is faster, else go back."""
        if self._tried is not None and speed > _FASTER * self._speed:
            if self._most in (self._tried, self._threads):
                of = f"{self._tried} of {self._most}" if self._tried < self._most else f"all {self._most}"
                self._progress.note(f"{self._name}: {of} threads train faster now")
            self._threads, self._rest_s = self._tried, _AGAIN_S
        else:
            self._use_threads(self._threads)
            self._rest_s = min(2.0 * self._rest_s, _SELDOM_S)
        self._try_from_s = self._clock() + self._rest_s
        self._tried = None
        self._begin()


@contextmanager
def watched(
    name: str, total_steps: int, progress: Progress, clock: Callable[[], float], device: torch.device
) -> Iterator[Crowding]:
    """Watch a training on `device`; afterwards torch has the threads that it had before."""
    most = torch.get_num_threads()
    try:
        yield Crowding(name, total_steps, progress, clock, most=most if device.type == "cpu" else 1)
    finally:
        if torch.get_num_threads() != most:
            torch.set_num_threads(most)
