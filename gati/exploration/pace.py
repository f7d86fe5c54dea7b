"""The pace of a training, and the number of steps that fit into a budget."""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

_KEPT = 50  # of the latest times: machines change while they train


class Pace(NamedTuple):
    """Seconds a batch: for the base model's answers, where they are computed, and for all else."""

    answer_s: float
    learn_s: float


class Stopwatch:
    """Collects the times of a training."""

    def __init__(self) -> None:
        self._answers: deque[float] = deque(maxlen=_KEPT)
        self._rest: deque[float] = deque(maxlen=_KEPT)

    def note(self, whole_s: float, answer_s: float) -> None:
        """Take in a step, of which base answers took `answer_s`: 0 where they were remembered."""
        self._rest.append(whole_s - answer_s)
        if answer_s > 0:
            self._answers.append(answer_s)

    @property
    def pace(self) -> Pace:
        """Medians, so that the first steps, which build what the others use, do not count."""
        if not self._rest:
            return Pace(0.0, 0.0)
        answer_s = statistics.median(self._answers) if self._answers else 0.0
        return Pace(answer_s, statistics.median(self._rest))


def affordable_steps(budget_s: float, pace: Pace, *, steps_per_round: int, rounds: int | None) -> int:
    """Return how many steps fit into a budget, when base answers are computed once for each of `rounds`.

    `rounds` None stands for answers that are computed in every step.
    """
    fresh_s = pace.answer_s + pace.learn_s
    if fresh_s <= 0:
        raise ValueError("a pace of no seconds: train a few steps first")
    fresh = int(budget_s / fresh_s)
    if rounds is None or fresh < rounds * steps_per_round or pace.learn_s <= 0:
        return fresh
    return int((budget_s - rounds * steps_per_round * pace.answer_s) / pace.learn_s)


def allowance(left_s: float, planned_s: float, waiting_s: float, at_once: int) -> float:
    """Seconds that a training may take so that all end within `left_s`, if `at_once` train concurrently.

    It was planned for `planned_s`; others that are planned for `waiting_s` in all have not begun. With one
    at a time, each gets its share; with more, time is left over, and a slow worker need not hurry.
    """
    share = planned_s / max(planned_s + waiting_s, 1e-9)
    return max(0.0, min(left_s, at_once * share * left_s))
