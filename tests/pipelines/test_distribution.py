"""Latencies that are mixed and added, and overhead as a part of a stage's time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.pipelines import Distribution, Pipeline
from gati.pipelines.forks import follows
from gati.pipelines.policies import StaticPolicy
from gati.pipelines.tables import Grid, ValueTable
from tests.pipelines.build import SHAPES, option, pipeline, stage

some = settings(max_examples=40, deadline=None)
distributions = st.lists(st.floats(0.01, 1e3), min_size=1, max_size=40).map(Distribution.from_samples)


@given(distributions, distributions, st.floats(0.0, 1.0), st.floats(0.0, 1e3))
@some
def test_a_mixture_is_one_or_the_other(
    one: Distribution, other: Distribution, share: float, limit_ms: float
) -> None:
    mixed = one.mixed(other, share)
    assert sum(mixed.probabilities) == pytest.approx(1.0)
    assert list(mixed.values_ms) == sorted(mixed.values_ms)
    assert mixed.mean_ms == pytest.approx((1.0 - share) * one.mean_ms + share * other.mean_ms)
    expected = (1.0 - share) * one.reaches(limit_ms) + share * other.reaches(limit_ms)
    assert mixed.reaches(limit_ms) == pytest.approx(expected, abs=1e-9)


@given(distributions, distributions)
@some
def test_a_sum_has_the_mean_and_the_quantiles_of_all_sums(one: Distribution, other: Distribution) -> None:
    found = one.plus(other)
    assert sum(found.probabilities) == pytest.approx(1.0)
    assert found.mean_ms == pytest.approx(one.mean_ms + other.mean_ms)
    pairs = sorted(
        (a + b, p * q)
        for a, p in zip(one.values_ms, one.probabilities, strict=True)
        for b, q in zip(other.values_ms, other.probabilities, strict=True)
    )
    for probability in (0.25, 0.5, 0.95):
        low, high = (_quantile(pairs, probability + nudge) for nudge in (-1e-6, 1e-6))
        assert 0.994 * low <= found.quantile_ms(probability) <= 1.006 * high


def _quantile(pairs: list[tuple[float, float]], probability: float) -> float:
    reached = 0.0
    for value, weight in pairs:
        reached += weight
        if reached >= probability:
            return value
    return pairs[-1][0]


@pytest.mark.parametrize("shape", SHAPES)
def test_overhead_is_time_as_any_other(shape: str) -> None:
    """An overhead of 1 or 3 ms, or networks that take 1 or 3 ms longer: the same values and choices."""
    edges = SHAPES[shape]
    names = sorted({"a", *(name for edge in edges for name in edge[:2])})
    beside, inside = (
        pipeline({name: stage(option(0.8, *fast), option(0.9, *slow)) for name in names}, *edges)
        for fast, slow in (((1.0,), (2.0,)), ((2.0, 4.0), (3.0, 5.0)))
    )
    beside = with_overhead(beside, Distribution.from_samples([1.0, 3.0]))
    cell_ms = 0.125  # divides all latencies: rounding up to cells decides nothing
    one, other = (ValueTable(Grid(each, follows(each), cell_ms, 256, 0.5)) for each in (beside, inside))
    assert one.values["a", None] == pytest.approx(other.values["a", None], abs=1e-9)
    statics = [StaticPolicy(each, 0.9) for each in (beside, inside)]
    for slo_ms in (4.9, 9.9, 14.9, 22.9):
        assert statics[0].begin(slo_ms) == statics[1].begin(slo_ms)


def with_overhead(found: Pipeline, overhead: Distribution) -> Pipeline:
    stages = {
        name: replace(
            each,
            options={key: replace(one, overhead=overhead) for key, one in each.options.items()},
        )
        for name, each in found.stages.items()
    }
    return replace(found, stages=stages)
