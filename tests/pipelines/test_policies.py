"""Every policy of pipelines, and the distributions it reads: what is promised whatever the policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import PipelineError
from gati.pipelines.distribution import Distribution
from gati.pipelines.pipeline import Pipeline
from gati.pipelines.policies import build_policy, policy_names, register_policy
from tests.pipelines.build import SEQUENTIAL, option, pipeline, pipelines, stage

every_policy = pytest.mark.parametrize("name", policy_names())
SMALL = pipeline({"a": stage(option(0.8, 1.0), option(0.9, 3.0)), "b": stage(option(0.9, 2.0))}, ("a", "b"))


@every_policy
@settings(max_examples=15)
@given(found=pipelines(SEQUENTIAL), slo_ms=st.integers(1, 25), left=st.floats(-1.0, 1.5))
def test_a_policy_chooses_an_option_of_the_stage_and_the_same_one_again(
    name: str, found: Pipeline, slo_ms: int, left: float
) -> None:
    policy = build_policy(name, found, 0.9)
    for each, running in found.stages.items():
        chosen = policy.begin(slo_ms).choose(each, left * slo_ms, None)
        assert chosen.option in running.options
        assert math.isfinite(chosen.budget_ms)
        policy.begin(2.0 * slo_ms).choose(each, slo_ms, None)  # another query changes nothing
        assert policy.begin(slo_ms).choose(each, left * slo_ms, None) == chosen


@every_policy
def test_with_all_the_time_the_most_accurate_runs_and_with_none_the_fastest(name: str) -> None:
    policy = build_policy(name, SMALL, 0.9)
    assert policy.begin(1000.0).choose("a", 1000.0, None).option == "o1"
    assert policy.begin(0.5).choose("a", 0.5, None).option == "o0"


def test_an_unknown_policy_and_a_second_of_a_name_are_refused() -> None:
    with pytest.raises(PipelineError, match=f"no policy 'x'; choose one of {', '.join(policy_names())}"):
        build_policy("x", SMALL, 0.9)
    with pytest.raises(PipelineError, match="is registered already; choose another name"):
        register_policy(policy_names()[0])(lambda found, attainment: build_policy("x", found, attainment))


samples = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30)


@given(samples, st.floats(0.01, 1.0))
def test_a_quantile_is_the_least_sample_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = Distribution.from_samples(values).quantile_ms(share)
    enough = [each for each in sorted(values) if np.mean(np.asarray(values) <= each) >= share - 1e-9]
    assert found == enough[0]


@given(samples)
def test_a_distribution_has_the_mean_of_its_samples(values: list[float]) -> None:
    found = Distribution.from_samples(values)
    assert found.mean_ms == pytest.approx(np.mean(values))
    assert sum(found.probabilities) == pytest.approx(1.0)
    assert list(found.values_ms) == sorted(set(values))


@pytest.mark.parametrize("wrong", [[], [0.0], [1.0, math.nan], [math.inf], [-1.0]])
def test_what_is_no_latency_is_refused(wrong: list[float]) -> None:
    with pytest.raises(PipelineError, match="measure again"):
        Distribution.from_samples(wrong)
