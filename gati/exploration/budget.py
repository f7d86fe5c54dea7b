"""The remaining time of an exploration."""

from __future__ import annotations

from collections.abc import Callable

from gati.costs.disturbance import MACHINE, Machine
from gati.exploration.crowding import CROWDED, crowding_since
from gati.exploration.state import RunState

Clock = Callable[[], float]

_TRIED = 128  # inputs on which augmentations are tried
_TRYING_SHARE, _MOST_TRIALS = 0.05, 9  # of a budget; answers to each of these inputs


class Budget:
    """A limit on wall-clock seconds since `began`; time spent by interrupted earlier runs counts, too.

    A `budget_s` of None means no limit. `machine` counts how long threads wait for a core meanwhile.
    """

    def __init__(
        self,
        budget_s: float | None,
        clock: Clock,
        began: float,
        state: RunState,
        machine: Machine = MACHINE,
    ) -> None:
        self.budget_s, self.clock, self._state = budget_s, clock, state
        self._began = began - state.spent_s
        self._waiting = crowding_since(lambda: machine.now_ns() / 1e9, machine)

    @property
    def spent_s(self) -> float:
        """Seconds used so far."""
        return self.clock() - self._began

    def left_s(self) -> float | None:
        """Seconds left, at least 0; None without a limit."""
        return None if self.budget_s is None else max(0.0, self.budget_s - self.spent_s)

    def is_spent(self, needed_s: float = 0.0) -> bool:
        """Whether no time is left, or less than `needed_s` seconds."""
        left_s = self.left_s()
        return left_s is not None and (left_s == 0.0 or left_s < needed_s)

    def inputs_to_try(self, input_s: float) -> int:
        """On how many inputs to try augmentations: fewer if a network that takes `input_s` each is slow."""
        if self.budget_s is None or input_s <= 0:
            return _TRIED
        return min(_TRIED, int(_TRYING_SHARE * self.budget_s / (_MOST_TRIALS * input_s)))

    def other_programs(self) -> str:
        """What to add to a message about too little time if threads had to wait for cores, or "".

        They may have waited for each other: network and compilers use as many as they like.
        """
        waited_s = self._waiting()
        if waited_s < CROWDED:
            return ""
        return (
            f"; threads waited for a core for {waited_s:.2f} s in a second: if other programs run, stop them"
        )

    def note(self) -> None:
        """Record the time used, for the run that resumes if this one is interrupted."""
        self._state.write_spent(self.spent_s)
