"""Class by class: counts against counting by hand, intervals against the binomial itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from gati.evaluation.by_class import count_classes, exact_interval


@given(trials=st.integers(1, 300), data=st.data())
def test_the_ends_of_an_interval_leave_two_and_a_half_percent_out(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    low, high = exact_interval(successes, trials)
    assert 0.0 <= low <= successes / trials <= high <= 1.0
    if successes:
        assert binom.sf(successes - 1, trials, low) == pytest.approx(0.025, abs=1e-6)
    if successes < trials:
        assert binom.cdf(successes, trials, high) == pytest.approx(0.025, abs=1e-6)


def test_without_trials_nothing_is_known() -> None:
    assert exact_interval(0, 0) == (0.0, 1.0)


def test_classes_are_counted_as_the_base_model_names_them() -> None:
    base = np.array([0, 0, 0, 2, 2])
    answer = np.array([0, 1, 0, 2, 2])
    hit = np.array([True, True, False, False, False])
    first, second = count_classes(answer, base, hit, ("cat", "dog", "bird"))
    assert (first.name, first.n) == ("cat", 3)
    assert first.agreement.value == pytest.approx(2 / 3)
    assert first.hit_rate.value == pytest.approx(2 / 3)
    assert (second.name, second.n, second.agreement.value, second.hit_rate.value) == ("bird", 2, 1.0, 0.0)
    assert (first.agreement.low, first.agreement.high) == exact_interval(2, 3)
    assert [each.name for each in count_classes(answer, base, hit, None)] == ["0", "2"]
