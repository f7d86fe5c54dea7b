"""Decayed counts and histograms against sums over everything that was ever added."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gati.errors import PipelineError
from gati.pipelines import DecayedCounts, DecayedHistogram, Distribution

BIN = 1.03  # bounds of neighbouring bins


class Added(NamedTuple):
    value_ms: float
    at: float
    weight: float


_added = st.builds(Added, st.floats(1e-2, 1e4), st.floats(0.0, 3e4), st.floats(0.1, 30.0))
some = settings(max_examples=60, deadline=None)


def histogram(added: list[Added], half_life: float) -> DecayedHistogram:
    found = DecayedHistogram(half_life)
    for one in added:
        found.observe(one.value_ms, one.at, one.weight)
    return found


def weights(added: list[Added], half_life: float, at: float) -> list[float]:
    return [one.weight * 2.0 ** ((one.at - at) / half_life) for one in added]


@given(st.lists(_added, min_size=1, max_size=40), st.floats(20.0, 2000.0))
@some
def test_mass_mean_and_quantiles_are_those_of_everything_weighed_by_age(
    added: list[Added], half_life: float
) -> None:
    now = max(one.at for one in added)
    found, ages = histogram(added, half_life), weights(added, half_life, now)
    assert found.mass(now) == pytest.approx(sum(ages), rel=1e-6)
    mean = sum(age * one.value_ms for age, one in zip(ages, added, strict=True)) / sum(ages)
    assert found.mean_ms() == pytest.approx(mean, rel=1e-6)
    distribution = found.distribution()
    assert distribution is not None
    assert sum(distribution.probabilities) == pytest.approx(1.0)
    for share in (0.1, 0.5, 0.9):
        # the oracle's quantile a little below and a little above: sums of floats differ at the edges
        low, high = (_quantile(added, ages, share + nudge) for nudge in (-1e-6, 1e-6))
        assert low / BIN * (1 - 1e-9) <= distribution.quantile_ms(share) <= high * BIN * (1 + 1e-9)


def _quantile(added: list[Added], ages: list[float], share: float) -> float:
    reached = 0.0
    pairs = sorted(zip((one.value_ms for one in added), ages, strict=True))
    for value, age in pairs:
        reached += age / sum(ages)
        if reached >= share:
            return value
    return pairs[-1][0]


@given(st.lists(_added, min_size=1, max_size=20), st.floats(20.0, 2000.0), st.floats(0.0, 5.0))
@some
def test_everything_counts_half_after_each_half_life(
    added: list[Added], half_life: float, half_lives: float
) -> None:
    now = max(one.at for one in added)
    found = histogram(added, half_life)
    later = found.mass(now + half_lives * half_life)
    assert later == pytest.approx(found.mass(now) * 0.5**half_lives, rel=1e-6)


@given(st.lists(_added, min_size=1, max_size=20), st.lists(_added, max_size=20), st.floats(20.0, 2000.0))
@example([Added(1.0, 18074.0, 1.0)], [Added(0.01, 17702.0, 7.0)], 20.0)  # a limit is met but for rounding
@some
def test_merged_is_as_if_one_had_seen_everything(
    one: list[Added], other: list[Added], half_life: float
) -> None:
    merged, together = histogram(one, half_life), histogram(one + other, half_life)
    merged.merge(histogram(other, half_life))
    now = max(each.at for each in one + other)
    assert merged.mass(now) == pytest.approx(together.mass(now), rel=1e-6)
    assert merged.mean_ms() == pytest.approx(together.mean_ms(), rel=1e-6)
    assert _close(merged.distribution(), together.distribution())


def _close(one: Distribution | None, other: Distribution | None) -> bool:
    """Whether two distributions are the same but for rounding, of their values as well."""
    assert one is not None and other is not None
    for limit in (1e-2 * 1.5**power for power in range(36)):
        low, high = sorted(one.reaches(limit * near) for near in (1.0 - 1e-9, 1.0 + 1e-9))
        if not low - 1e-6 <= other.reaches(limit) <= high + 1e-6:
            return False
    return True


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 9e3)), min_size=1, max_size=30))
@some
def test_shares_of_counts(added: list[tuple[str, float]]) -> None:
    counts: DecayedCounts[str] = DecayedCounts(100.0)
    for key, at in added:
        counts.add(key, at)
    now = max(at for _, at in added)
    own = {key: sum(2.0 ** ((at - now) / 100.0) for each, at in added if each == key) for key in "abc"}
    for key, weight in own.items():
        assert counts.count(key, now) == pytest.approx(weight, rel=1e-6, abs=1e-9)
        assert counts.shares().get(key, 0.0) == pytest.approx(weight / sum(own.values()), abs=1e-9)


def test_memory_is_bounded_and_no_weight_overflows() -> None:
    found = DecayedHistogram(8.0)
    for at in range(200_000):
        found.observe(1e-4 * 1.0007 ** (at % 40_000), at)
    distribution = found.distribution()
    assert distribution is not None and len(distribution.values_ms) <= 800
    assert found.mass(199_999) == pytest.approx(1.0 / (1.0 - 2.0 ** (-1.0 / 8.0)), rel=1e-9)
    assert math.isfinite(found.mean_ms() or math.nan)


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(PipelineError, match="half_life is 0; give a number above zero"):
        DecayedHistogram(0)
    with pytest.raises(PipelineError, match="half-lives 2.0 and 3.0 differ"):
        DecayedHistogram(2.0).merge(DecayedHistogram(3.0))
    empty = DecayedHistogram(2.0)
    assert (empty.distribution(), empty.mean_ms(), empty.mass(9.0), empty.shares()) == (None, None, 0.0, {})
