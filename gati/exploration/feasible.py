"""Whether a budget suffices at all: an exploration that cannot keep it says so after a few answers."""

from __future__ import annotations

import math

from gati.errors import DataError
from gati.exploration.budget import Budget

FIRST_INPUTS = 8  # that are answered before the first look
# What must follow the answers to the held-out inputs, in answers of the network.
_MEASURING = 100  # profile and lookups
_LEAST_TAUGHT = 256  # of training inputs
_CLEARLY = 0.5  # share of the time left: small batches are slower per input, and planning takes time
_USEFUL = 1.5  # times the least time


def least_seconds(answers: int, input_s: float) -> float:
    """The least time of what follows, if the network takes `input_s` for each input of a batch."""
    return (answers + _MEASURING + _LEAST_TAUGHT) * input_s


def nothing_trained(budget: Budget, option: str) -> DataError:
    """The error of a run that had no time to train anything; `option` is how the user gives it time."""
    minutes = math.ceil(2.0 * max(budget.budget_s or 0.0, budget.spent_s) / 60)
    return DataError(
        f"the budget of {budget.budget_s or 0:.0f} s was too short to train anything: give {option} "
        f"{minutes}m or more{budget.other_programs()}"
    )


class TimeLimit:
    """Looks whether answering `count` held-out inputs leaves time within `budget` to train anything."""

    def __init__(self, budget: Budget, count: int) -> None:
        self.budget, self.count = budget, count

    def is_clear(self, input_s: float) -> bool:
        """Whether there is no question, at the speed of a small batch."""
        left_s = self.budget.left_s()
        return left_s is None or least_seconds(self.count, input_s) <= _CLEARLY * left_s

    def check_training(self, input_s: float, *, measured: int) -> None:
        """Look before anything trains; `measured` inputs must be answered again to measure what is trained.

        **Raises:** `DataError` as `check`.
        """
        self._check((measured + _LEAST_TAUGHT) * input_s / _CLEARLY, input_s)

    def check(self, done: int, input_s: float) -> None:
        """Look after `done` answers; the others will take `input_s` each.

        **Raises:** `DataError` if there is too little time; the message says how much would be needed.
        """
        self._check(least_seconds(self.count - done, input_s), input_s)

    def _check(self, needed_s: float, input_s: float) -> None:
        left_s = self.budget.left_s()
        if left_s is None or needed_s <= left_s:
            return
        minutes = math.ceil(_USEFUL * (self.budget.spent_s + needed_s) / 60)
        raise DataError(
            f"the budget of {self.budget.budget_s:.0f} s is too short: the network takes {input_s:.2g} s per "
            f"input, and must answer {self.count} held-out inputs, and train; give --budget "
            f"{minutes}m or more, or fewer inputs{self.budget.other_programs()}"
        )
