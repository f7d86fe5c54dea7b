"""The simulation behind the capacity page, compared with queueing theory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.queueing import ONE_QUEUE, POLICIES, RANDOM, TWO_CHOICES, poisson, traced, waits_s

COUNT = 40_000


def erlang_c(replicas: int, busy: float) -> float:
    """The probability that a request waits in M/M/c."""
    load = replicas * busy
    below = sum(load**k / math.factorial(k) for k in range(replicas))
    full = load**replicas / math.factorial(replicas) / (1.0 - busy)
    return full / (below + full)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("times", ["M/M/1", "M/D/1"])
def test_one_replica_waits_as_the_formula_says(policy: str, times: str) -> None:
    busy = 0.6
    arrivals = poisson(busy, COUNT, seed=1)
    services = np.ones(COUNT) if times == "M/D/1" else np.random.default_rng(2).exponential(1.0, COUNT)
    expected = busy / (1.0 - busy) / (2.0 if times == "M/D/1" else 1.0)  # Pollaczek and Khinchine
    assert np.mean(waits_s(arrivals, services, policy, 1)) == pytest.approx(expected, rel=0.05)


def test_one_queue_of_several_replicas_waits_as_erlang_says_and_random_as_each_alone() -> None:
    arrivals = poisson(4 * 0.7, COUNT, seed=3)
    services = np.random.default_rng(4).exponential(1.0, COUNT)
    one, two, none = (np.mean(waits_s(arrivals, services, policy, 4)) for policy in POLICIES)
    assert one == pytest.approx(erlang_c(4, 0.7) / (4 * (1.0 - 0.7)), rel=0.08)
    assert none == pytest.approx(0.7 / (1.0 - 0.7), rel=0.08)
    assert one < two < 0.5 * none


@settings(max_examples=25)
@given(
    gaps=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=40),
    times=st.lists(st.floats(0.01, 3.0), min_size=40, max_size=40),
    policy=st.sampled_from(POLICIES),
)
def test_one_replica_waits_as_lindley_says(gaps: list[float], times: list[float], policy: str) -> None:
    arrivals, services = np.cumsum(gaps), np.array(times[: len(gaps)])
    expected = [0.0]
    for gap, service in zip(np.diff(arrivals), services, strict=False):
        expected.append(max(0.0, expected[-1] + service - gap))
    np.testing.assert_allclose(waits_s(arrivals, services, policy, 1, schedulers=2), expected, atol=1e-9)


@settings(max_examples=10)
@given(seed=st.integers(0, 1000), replicas=st.integers(2, 6))
def test_nothing_waits_less_than_in_one_queue(seed: int, replicas: int) -> None:
    arrivals = poisson(0.8 * replicas, 400, seed)
    services = np.ones(400)
    best = np.sum(waits_s(arrivals, services, ONE_QUEUE, replicas))
    for policy in (RANDOM, TWO_CHOICES):
        assert np.sum(waits_s(arrivals, services, policy, replicas, seed=seed)) >= best - 1e-6


def test_copies_of_a_trace_keep_its_mean_rate() -> None:
    trace = np.array([0.0, 1.0, 1.1, 1.2, 4.0])
    found = traced(trace, rate=10.0, count=1000, copies=8)
    assert len(found) == 40 and np.all(np.diff(found) >= 0.0) and found[-1] <= 4.0 + 1e-9
