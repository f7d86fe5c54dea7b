"""Both published forms, on every solver, against brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gati.composition.check import check_full, check_relaxed, check_structure
from gati.composition.full import solve_full
from gati.composition.problem import Candidate, Problem, estimate
from gati.composition.relaxed import ALPHA_STEPS, solve_relaxed, sweep_relaxed
from gati.composition.solvers import SOLVERS
from gati.errors import CompositionError, SolverError
from gati.types import TrialId
from tests.composition.problems import problems
from tests.composition.solving import require
from tests.oracles import best_full_latency, best_relaxed_score, every_choice

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@pytest.mark.parametrize("solver", sorted(SOLVERS))
@few
@given(problem=problems(), step=st.integers(0, ALPHA_STEPS), cap=st.none() | st.integers(1, 4))
def test_the_relaxed_form_reaches_the_best_score_there_is(solver, problem, step, cap):
    require(solver)
    choice = solve_relaxed(problem, step / ALPHA_STEPS, most_caches=cap, solver=solver)
    assert choice.objective == pytest.approx(best_relaxed_score(problem, step / ALPHA_STEPS, cap), abs=1e-6)
    assert choice.gap == pytest.approx(0.0, abs=1e-6)
    assert choice.solver == solver


@pytest.mark.parametrize("solver", sorted(SOLVERS))
@few
@given(problem=problems())
def test_the_full_form_reaches_the_least_expected_latency_there_is(solver, problem):
    require(solver)
    choice = solve_full(problem, solver=solver)
    assert choice.objective == pytest.approx(best_full_latency(problem), abs=1e-5)
    assert estimate(problem, choice.candidates).mean_latency_ms == pytest.approx(choice.objective, abs=1e-5)


@few
@given(problem=problems())
def test_the_sweep_of_alpha_is_never_worse_than_no_caches_nor_than_any_single_alpha(problem):
    best = sweep_relaxed(problem, solver="highs")
    latency = estimate(problem, best.candidates).mean_latency_ms
    assert latency <= problem.base_ms + 1e-9
    for step in (0, 7, ALPHA_STEPS):
        single = solve_relaxed(problem, step / ALPHA_STEPS, solver="highs")
        assert latency <= estimate(problem, single.candidates).mean_latency_ms + 1e-6
    check_relaxed(problem, best.candidates)


@few
@given(problem=problems())
def test_the_check_accepts_exactly_the_choices_that_brute_force_enumerates(problem):
    allowed = {tuple(chosen) for chosen in every_choice(problem)}
    free = replace(problem, memory_limit_bytes=None, one_lookup_at_a_time=False)
    for chosen in list(every_choice(free))[:200]:
        if tuple(chosen) in allowed:
            check_structure(problem, chosen)
        else:
            with pytest.raises(SolverError):
                check_structure(problem, chosen)


def candidate(block: int, **changes: object) -> Candidate:
    plain = Candidate(
        trial_id=TrialId(f"t{block}"),
        block_index=block,
        variant="fc(64)",
        threshold=0.5,
        hit_rate=0.5,
        accuracy=0.99,
        lookup_ms=0.1,
        penalty_ms=0.1,
        memory_bytes=1000,
    )
    return replace(plain, **changes)


def problem_of(*candidates: Candidate, **changes: object) -> Problem:
    return replace(Problem((1.0, 2.0, 3.0), 4.0, candidates, 0.97), **changes)


@pytest.mark.parametrize(
    ("chosen", "changes", "message"),
    [
        pytest.param(
            (candidate(1), candidate(1)), {}, "exits need different blocks, in order", id="two at one block"
        ),
        pytest.param(
            (candidate(2), candidate(0)),
            {},
            "exits need different blocks, in order",
            id="not in forward order",
        ),
        pytest.param(
            (candidate(0),),
            {"memory_limit_bytes": 999},
            "1000 bytes of caches, the limit is 999",
            id="memory",
        ),
        pytest.param(
            (candidate(0, lookup_ms=1.2), candidate(1)),
            {},
            "would still be running",
            id="two lookups at a time",
        ),
        pytest.param((candidate(0, accuracy=0.9),), {}, "expected agreement 0.95000", id="agreement"),
        pytest.param(
            (candidate(0), candidate(1, hit_rate=0.4)), {}, "no hits beyond", id="falling hit rates"
        ),
    ],
)
def test_a_violated_constraint_is_named(chosen, changes, message):
    with pytest.raises(SolverError, match=message):
        check_full(problem_of(*chosen, **changes), chosen)


def test_the_relaxed_filter_is_checked_for_each_cache():
    chosen = (candidate(0, accuracy=0.969),)
    with pytest.raises(SolverError, match="accuracy 0.9690, the filter requires 0.9700"):
        check_relaxed(problem_of(*chosen), chosen)


def test_a_late_cache_pays_for_the_misses_of_an_early_one():
    early, late = candidate(0, hit_rate=0.5, accuracy=1.0), candidate(2, hit_rate=0.75, accuracy=0.98)
    expected = estimate(problem_of(early, late), (early, late))
    assert expected.exit_ms == pytest.approx((1.1, 3.2))
    assert expected.effective_hit_rates == pytest.approx((0.5, 0.25))
    assert expected.mean_latency_ms == pytest.approx(0.5 * 1.1 + 0.25 * 3.2 + 0.25 * 4.2)
    assert expected.agreement == pytest.approx(1.0 - 0.25 * 0.02)


def test_a_lookup_as_long_as_the_way_to_the_next_cache_is_just_in_time():
    chosen = (candidate(0, lookup_ms=1.0), candidate(1, hit_rate=0.6))
    check_structure(problem_of(*chosen), chosen)


@pytest.mark.parametrize("accuracy", [0.0, 1.0, -0.5, 97, float("nan")])
def test_an_accuracy_target_outside_zero_and_one_is_refused(accuracy):
    with pytest.raises(CompositionError, match="must lie strictly between 0 and 1"):
        problem_of(accuracy=accuracy)
