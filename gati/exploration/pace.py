"""The pace of a training, and the number of steps that fit into a budget."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

SHOWINGS = 2  # of each view
_KEPT = 50  # latest times only: the speed of a machine changes while it trains
LATENESS = 0.05  # share of the allowed time by which training may lag before it is shortened


class Pace(NamedTuple):
    """Seconds per batch: for the base model's answers, if they are computed, and for the rest of a step."""

    answer_s: float
    learn_s: float


class Stopwatch:
    """Collects the times of a training."""

    def __init__(self) -> None:
        self._answers: deque[float] = deque(maxlen=_KEPT)
        self._fresh: deque[float] = deque(maxlen=_KEPT)  # whole steps with answers
        self._others: deque[float] = deque(maxlen=_KEPT)

    def note(self, whole_s: float, answer_s: float) -> None:
        """Record a step; base answers took `answer_s` of it, or 0 if they were kept from before."""
        if answer_s > 0:
            self._answers.append(answer_s)
            self._fresh.append(whole_s)
        else:
            self._others.append(whole_s)

    @property
    def pace(self) -> Pace:
        """The median times, which ignore the slow first steps.

        Where there are steps of both kinds, answers cost the difference: the engine that computes them also
        slows down the rest of a step.
        """
        if not self._fresh:
            return Pace(0.0, statistics.median(self._others) if self._others else 0.0)
        fresh_s, answer_s = statistics.median(self._fresh), statistics.median(self._answers)
        if not self._others:
            return Pace(answer_s, fresh_s - answer_s)
        learn_s = statistics.median(self._others)
        return Pace(max(0.0, fresh_s - learn_s), learn_s)


def affordable_steps(budget_s: float, pace: Pace, *, steps_per_round: int, rounds: int | None) -> int:
    """Return how many steps fit into a budget if base answers are computed only in the first `rounds` rounds.

    If `rounds` is None, they are computed in every step.
    """
    fresh_s = pace.answer_s + pace.learn_s
    if fresh_s <= 0:
        raise ValueError("the pace is 0 seconds: train a few steps first")
    fresh = int(budget_s / fresh_s)
    if rounds is None or fresh < rounds * steps_per_round or pace.learn_s <= 0:
        return fresh
    return int((budget_s - rounds * steps_per_round * pace.answer_s) / pace.learn_s)


class Rounds(NamedTuple):
    """How many rounds of views are useful.

    New views teach more than those already shown, but each costs an answer of the base model. So up to
    `enough` rounds there are as many as can be shown twice. If the costs are known, there are up to `most` as
    many as can be shown more often, because a student learns by heart what it sees many times: the more an
    answer costs, the more often.
    """

    fewest: int
    enough: int
    most: int  # for whose answers there is memory

    def within(self, budget_s: float, pace: Pace, *, steps_per_round: int) -> int:
        """Return how many rounds to train on in `budget_s` seconds."""

        def shown(times: float) -> int:
            a_round_s = steps_per_round * (pace.answer_s + times * pace.learn_s)
            return int(budget_s / a_round_s) if a_round_s > 0 else self.most

        # about where one more showing teaches as much in its time as a new view does
        often = 1.0 + 2.0 * math.sqrt(pace.answer_s / pace.learn_s) if pace.learn_s > 0 else 0.0
        further = min(self.most, shown(max(SHOWINGS, often)))
        return max(self.fewest, min(self.enough, shown(SHOWINGS)), further)

    def in_steps(self, steps: int, *, steps_per_round: int) -> int:
        """Return how many rounds to train on in so many steps, whatever these cost."""
        return max(self.fewest, min(self.enough, steps // (SHOWINGS * steps_per_round)))


class Course(NamedTuple):
    """The planned course of a training, whose first steps take longer because they compute base answers."""

    steps: int
    fresh_steps: int = 0  # how many of the steps compute base answers
    fresh_cost: float = 1.0  # time of such a step, relative to one of the others

    def share_of_steps(self, share_of_time: float) -> float:
        """The share of the steps that should be done after that share of the time; above 1 after its end."""
        passed = share_of_time * self._time_until(self.steps)
        fresh = self._time_until(self.fresh_steps)
        done = passed / self.fresh_cost if passed <= fresh else self.fresh_steps + passed - fresh
        return done / self.steps

    def share_of_time(self, step: float) -> float:
        """The share of the time after which that step should be reached."""
        return self._time_until(step) / self._time_until(self.steps)

    def _time_until(self, step: float) -> float:
        """In units of a step without base answers."""
        fresh = min(step, self.fresh_steps)
        return self.fresh_cost * fresh + step - fresh


def allowance(left_s: float, planned_s: float, waiting_s: float, at_once: int) -> float:
    """Seconds that a training may take so that all end within `left_s`, if `at_once` run in parallel.

    It is planned for `planned_s`; those that have not started are planned for `waiting_s` in total. If one
    runs at a time, each gets its share; if several do, there is time to spare for a slow worker.
    """
    share = planned_s / max(planned_s + waiting_s, 1e-9)
    return max(0.0, min(left_s, at_once * share * left_s))
