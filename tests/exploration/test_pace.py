"""How many steps a budget buys."""

from __future__ import annotations

from dataclasses import replace
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
    Rounds,
    Stopwatch,
    affordable_steps,
)
from gati.exploration.recipes import EXITS, STUDENTS, recipe_of_students
from gati.exploration.remembered import BatchMemory
from gati.exploration.schedule import rounds_of_steps, useful_rounds
from gati.exploration.state import StagePlan
from gati.exploration.views import ViewedBatch


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
    st.integers(0, 50), st.integers(0, 50),
)  # fmt: skip
def test_further_rounds_of_views_are_those_that_can_be_shown_twice_or_later_more_often(
    budget_s: float, answer_s: float, learn_s: float, steps_per_round: int, fewest: int, more: int, rest: int
) -> None:
    pace, enough, most = Pace(answer_s, learn_s), fewest + more, fewest + more + rest
    rounds = Rounds(fewest, enough, most).within(budget_s, pace, steps_per_round=steps_per_round)
    assert fewest <= rounds <= most

    def showings(with_rounds: int) -> float:
        steps = affordable_steps(budget_s, pace, steps_per_round=steps_per_round, rounds=with_rounds)
        return steps / (with_rounds * steps_per_round)

    often = max(2.0, 1 + 2 * (answer_s / learn_s) ** 0.5)
    a_step = 1 / (rounds * steps_per_round)
    if rounds > fewest:
        assert showings(rounds) >= (2 if rounds <= enough else often) - a_step
    if rounds < most:
        assert showings(rounds + 1) <= (2 if rounds < enough else often)


def test_the_more_an_answer_costs_the_more_often_its_view_is_shown() -> None:
    useful, showings = Rounds(6, 6, 10_000), []
    for answer_s in (0.05, 0.2, 0.8, 3.2):
        pace = Pace(answer_s, 0.1)
        rounds = useful.within(200_000.0, pace, steps_per_round=390)
        steps = affordable_steps(200_000.0, pace, steps_per_round=390, rounds=rounds)
        showings.append(steps / (rounds * 390))
    assert showings == sorted(showings) and 2 < showings[0] < 3 and 12 < showings[-1] < 14


def test_many_inputs_are_shown_in_the_fewest_rounds_unless_they_are_shown_very_often() -> None:
    many, few = useful_rounds(50_000, 128, STUDENTS), useful_rounds(2_560, 128, STUDENTS)
    assert many is not None and few is not None
    pace = Pace(0.1, 0.1)
    assert many.within((6 + 12) * 39.0, pace, steps_per_round=390) == 6
    assert many.within((6 + 24) * 39.0, pace, steps_per_round=390) == 7
    assert many.within((6 + 127) * 39.0, pace, steps_per_round=390) == 33
    assert many.in_steps(127 * 390, steps_per_round=390) == 6, "it is not known what further answers cost"
    assert few.in_steps(4000, steps_per_round=20) == 100
    assert few.in_steps(100, steps_per_round=20) == 6


@given(st.integers(2, 30_000), st.integers(2**20, 2**30), st.integers(1, 300))
def test_further_rounds_are_those_that_are_kept(classes: int, memory_bytes: int, batches: int) -> None:
    useful = useful_rounds(batches * 128, 128, STUDENTS.keeping(classes, memory_bytes))
    assert useful is not None
    rounds = useful.within(1e9, Pace(0.1, 0.1), steps_per_round=batches)
    rows = memory_bytes // (2 * classes)
    assert rounds <= max(useful.fewest, useful.enough, rows // (batches * 128))


def test_what_is_planned_is_kept() -> None:
    answers = torch.zeros(128, 10)
    memory_bytes = 40 * answers.numel() * 2
    useful = useful_rounds(3 * 128, 128, replace(STUDENTS, mixed=1e-9).keeping(10, memory_bytes))
    assert useful is not None
    rounds = Rounds(1, 1, useful.most).within(1e9, Pace(0.1, 0.1), steps_per_round=3)
    kept = BatchMemory(rounds, 3, memory_bytes)
    batches = [ViewedBatch(number, place) for number in range(rounds) for place in range(3)]
    for batch in batches:
        kept.put(batch, answers)
    assert rounds == 13 and all(kept.get(batch) is not None for batch in batches)


def test_views_that_never_repeat_have_no_rounds() -> None:
    assert useful_rounds(50_000, 128, EXITS) is None
    assert rounds_of_steps(1_000, 50_000, 128, EXITS) is None


def test_inputs_that_always_look_the_same_are_answered_once() -> None:
    tokens = recipe_of_students(torch.zeros(1, 8, dtype=torch.int64))
    assert useful_rounds(500, 32, tokens) == (1, 1, 1)


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
