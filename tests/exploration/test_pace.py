"""How many steps a budget buys."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.exploration.pace import Pace, Stopwatch, affordable_steps


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
