"""The running quantile converges, and follows a shift."""

from __future__ import annotations

import numpy as np
import pytest

from services.quantile import RunningQuantile


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
def test_it_settles_on_the_quantile_of_a_steady_stream(share: float) -> None:
    dice = np.random.default_rng(0)
    found = RunningQuantile(share)
    values = dice.exponential(2.0, 30_000)
    above = []
    for value in values:
        above.append(value > found.value)
        found.add(value)
    assert np.mean(above[2000:]) == pytest.approx(1.0 - share, abs=0.01)


def test_it_follows_a_changed_load_both_ways() -> None:
    dice = np.random.default_rng(1)
    found = RunningQuantile(0.98)
    for value in dice.normal(1.0, 0.1, 500):
        found.add(value)
    assert 1.0 < found.value < 1.6
    for value in dice.normal(10.0, 0.5, 200):
        found.add(value)
    assert found.value > 9.0
    for value in dice.normal(1.0, 0.1, 1500):
        found.add(value)
    assert found.value < 2.5
    found.shrink(0.5)
    assert found.value < 1.25
