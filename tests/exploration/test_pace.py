"""How many steps a budget buys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.exploration.groups import timekeeper
from gati.exploration.pace import (
    LATENESS,
    Course,
    Pace,
    Stopwatch,
    affordable_steps,
    rounds_for,
    rounds_in,
)
from gati.exploration.recipes import STUDENTS, recipe_of_students
from gati.exploration.schedule import most_rounds
from gati.exploration.state import StagePlan


def spent_s(steps: int, pace: Pace, steps_per_round: int, rounds: int | None) -> float:
    """Step by step."""
    fresh = steps if rounds is None else min(steps, rounds * steps_per_round)
    return sum(pace.learn_s + (pace.answer_s if step < fresh else 0.0) for step in range(steps))


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0, 100),
    st.floats(0.0, 2.0),
    st.floats(0.1, 2.0),
    st.integers(1, 20),
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_as_many_steps_as_the_budget_buys_and_no_more(
    budget_s: float, answer_s: float, learn_s: float, steps_per_round: int, rounds: int | None
) -> None:
    pace = Pace(answer_s, learn_s)
    steps = affordable_steps(budget_s, pace, steps_per_round=steps_per_round, rounds=rounds)
    assert spent_s(steps, pace, steps_per_round, rounds) <= budget_s + 1e-6
    assert spent_s(steps + 1, pace, steps_per_round, rounds) > budget_s - 1e-6


def test_a_pace_is_of_the_usual_step() -> None:
    watch = Stopwatch()
    assert watch.pace == Pace(0.0, 0.0)
    watch.note(9.0, 8.0)  # the first one compiles
    for _ in range(5):
        watch.note(0.3, 0.2)
        watch.note(0.1, 0.0)
    assert watch.pace == pytest.approx((0.2, 0.1))


def test_answers_cost_what_a_step_takes_longer_with_them() -> None:
    """Their engine's threads wait for more work for a while, so that the rest of the step is slower, too."""
    watch = Stopwatch()
    watch.note(0.5, 0.2)
    assert watch.pace == pytest.approx((0.2, 0.3))  # nothing else is known yet
    watch.note(0.1, 0.0)
    assert watch.pace == pytest.approx((0.4, 0.1))


def test_without_a_pace_no_number_of_steps_is_made_up() -> None:
    with pytest.raises(ValueError, match="train a few steps first"):
        affordable_steps(60, Pace(0, 0), steps_per_round=3, rounds=2)


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0, 1000), st.floats(0.0, 2.0), st.floats(0.1, 2.0), st.integers(1, 20), st.integers(1, 8),
    st.integers(0, 50),
)  # fmt: skip
def test_further_rounds_of_views_are_those_that_can_be_shown_twice(
    budget_s: float, answer_s: float, learn_s: float, steps_per_round: int, fewest: int, more: int
) -> None:
    pace, most = Pace(answer_s, learn_s), fewest + more
    rounds = rounds_for(budget_s, pace, steps_per_round=steps_per_round, fewest=fewest, most=most)
    assert rounds is not None and fewest <= rounds <= most

    def steps(with_rounds: int) -> int:
        return affordable_steps(budget_s, pace, steps_per_round=steps_per_round, rounds=with_rounds)

    if rounds > fewest:
        assert steps(rounds) >= 2 * rounds * steps_per_round - 1
    if rounds < most:
        assert steps(rounds + 1) <= 2 * (rounds + 1) * steps_per_round


def test_many_inputs_are_shown_in_the_fewest_rounds_and_few_in_more() -> None:
    many, few = most_rounds(50_000, 128, STUDENTS), most_rounds(2_560, 128, STUDENTS)
    assert rounds_in(33 * 390, steps_per_round=390, fewest=6, most=many) == 6
    assert rounds_in(4000, steps_per_round=20, fewest=6, most=few) == 100
    assert rounds_in(4000, steps_per_round=20, fewest=6, most=50) == 50
    assert rounds_in(100, steps_per_round=20, fewest=6, most=50) == 6
    assert rounds_in(100, steps_per_round=20, fewest=None, most=50) is None
    assert rounds_for(60.0, Pace(0.1, 0.1), steps_per_round=3, fewest=None, most=50) is None


def test_inputs_that_always_look_the_same_are_answered_once() -> None:
    tokens = recipe_of_students(torch.zeros(1, 8, dtype=torch.int64))
    assert (tokens.rounds, most_rounds(500, 32, tokens)) == (1, 1)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.integers(0, 300), st.floats(1.0, 5.0), st.floats(0.0, 1.0))
def test_a_course_tells_which_step_is_due(steps: int, fresh: int, cost: float, share: float) -> None:
    """Against the time of every step, added up."""
    course = Course(steps, fresh, cost)
    times = [cost if step < fresh else 1.0 for step in range(steps)]
    for step in (0, steps // 3, steps):
        assert course.share_of_time(step) == pytest.approx(sum(times[:step]) / sum(times))
    due = course.share_of_steps(share) * steps
    whole = min(int(due), steps - 1)
    passed = sum(times[:whole]) + (due - whole) * times[whole]
    assert passed == pytest.approx(share * sum(times), abs=1e-6)


def test_a_course_goes_on_after_its_end() -> None:
    """So that a training that lags is ended."""
    assert Course(100).share_of_steps(1.06) == pytest.approx(1.06)
    assert Course(100, 100, 3.0).share_of_steps(1.06) > 1.06
    assert Course(100, 20, 3.0).share_of_steps(1.06) > 1.06


class _At:
    """A training at a step."""

    steps_per_round = 5

    def __init__(self, step: int) -> None:
        self.step, self.share = step, step / 100


@settings(deadline=None)
@given(st.integers(0, 100), st.floats(0, 400), st.sampled_from([None, 0, 4]))
def test_what_is_left_of_a_training_keeps_to_what_is_left_of_its_time(
    step: int, left_s: float, rounds: int | None
) -> None:
    """A training of 100 steps, planned for 200 seconds."""
    now = [0.0]
    plan = StagePlan(100, 200.0, "torch", rounds, 3.0)
    training: Any = _At(step)
    whole_s = 200.0 * (1.0 + LATENESS - Course(100, 5 * (rounds or 0), 3.0).share_of_time(step))
    done = timekeeper(plan, training, plan.planned_s, lambda: now[0], left_s=left_s)
    plain = timekeeper(plan, training, plan.planned_s, lambda: now[0])
    assert done is not None and plain is not None
    assert done() == pytest.approx(step / 100) == plain()
    for now[0] in (10.0, 50.0, 100.0):
        assert done() >= plain() - 1e-9
    now[0] = min(left_s, whole_s) + 1e-2
    assert done() >= 1.0  # where it stops, however few steps are done
    if left_s >= whole_s:  # a run that did not lag goes on as planned
        assert done() == pytest.approx(plain())


def test_without_a_budget_there_is_no_hurry() -> None:
    training: Any = _At(3)
    assert timekeeper(StagePlan(100, None), training, None, lambda: 0.0, left_s=None) is None
