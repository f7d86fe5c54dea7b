"""Policy `dynamic` against brute force, against simulation, and against the static plan."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import PipelineError
from gati.pipelines import Behaviour, Distribution, Finding, Pipeline, Planner
from gati.pipelines.dynamic import DynamicPolicy
from gati.pipelines.forks import follows
from gati.pipelines.planner import Run
from gati.pipelines.policies import StaticPolicy
from gati.pipelines.tables import Grid, ValueTable, column_of
from tests.pipelines.build import SEQUENTIAL, SHAPES, every_policy, option, pipeline, pipelines, stage

# Latencies are whole milliseconds and SLOs half ones, so that the grid's rounding decides nothing.
half_ms = st.integers(0, 20).map(lambda whole: whole + 0.5)
some = settings(max_examples=25, deadline=None)


prices = st.sampled_from([0.0, 0.05, 0.5, 2.0, 1e6])


@given(pipelines(SEQUENTIAL), half_ms, prices)
@some
def test_a_table_is_the_best_of_all_ways_to_choose(found: Pipeline, slo_ms: float, price: float) -> None:
    grid = Grid(found, follows(found), 0.05, 1024, 0.0)
    worth, _, in_time, _ = ValueTable(grid, price).values[found.input, None][:, column_of(slo_ms, 0.05, 1024)]
    best = max(w + price * p for w, p in every_policy(found, found.input, slo_ms))
    assert worth + price * in_time == pytest.approx(best, abs=1e-4)  # a millisecond costs 1e-6


@pytest.mark.slow
@given(pipelines(SEQUENTIAL), half_ms, st.sampled_from([0.3, 0.5, 0.75, 0.95]))
@some
def test_the_constraint_holds_wherever_it_can(found: Pipeline, slo_ms: float, attainment: float) -> None:
    forecast = DynamicPolicy(found, attainment, late_worth=0.0).forecast(slo_ms)
    feasible = [w for w, p in every_policy(found, found.input, slo_ms) if p >= attainment - 1e-9]
    if feasible:
        assert forecast.attainment >= attainment - 1e-9
        assert forecast.worth <= max(feasible) + 1e-9


@pytest.mark.slow
@given(pipelines(), half_ms, st.sampled_from([0.5, 0.75, 0.95]))
@settings(max_examples=8, deadline=None)
def test_never_worse_than_the_static_plan(found: Pipeline, slo_ms: float, attainment: float) -> None:
    policy = DynamicPolicy(found, attainment, late_worth=0.0, columns=256)
    choices = StaticPolicy(found, attainment).begin(slo_ms).choices
    worth, in_time = _brute_force(found, {name: choice.option for name, choice in choices.items()}, slo_ms)
    forecast = policy.forecast(slo_ms)
    if in_time >= attainment:
        assert forecast.attainment >= attainment - 1e-9
        assert forecast.worth >= worth - 1e-5  # a millisecond less is worth 1e-6
    elif forecast.attainment < attainment:
        assert forecast.attainment >= in_time - 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_forecast_of_fixed_options_is_exact_for_every_shape(shape: str) -> None:
    edges = SHAPES[shape]
    names = sorted({"a", *(name for edge in edges for name in edge[:2])})
    draw = random.Random(shape)
    stages = {
        name: stage(option(0.9, *(draw.randint(1, 4) for _ in range(3))), shares={"x": 0.3, "y": 0.7})
        for name in names
    }
    found = pipeline(stages, *edges)
    # whole milliseconds: five stages are rounded by less than half of one
    policy = DynamicPolicy(found, 0.9, late_worth=0.0, columns=256)
    outcomes = _outcomes(found, dict.fromkeys(names, "o0"))
    for slo_ms in (2.5, 4.5, 6.5, 8.5, 11.5):
        expected = _in_time(outcomes, slo_ms)
        forecast = policy.forecast(slo_ms)
        assert (forecast.worth, forecast.attainment) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_do_as_forecast(shape: str) -> None:
    """Planned and replanned one by one, at random latencies and labels."""
    edges = SHAPES[shape]
    names = sorted({"a", *(name for edge in edges for name in edge[:2])})
    options = [option(0.7, 1.0, 1.3, 2.2), option(0.8, 1.5, 2.0, 6.0), option(0.9, 2.0, 6.0, 9.0)]
    stages = {name: stage(*options, shares={"x": 0.4, "y": 0.6}) for name in names}
    found = pipeline(stages, *edges)
    policy = DynamicPolicy(found, 0.9)
    draw = random.Random(1)
    for slo_ms in (6.0, 11.0, 17.0):
        runs = (Run(found, policy.begin(slo_ms), slo_ms) for _ in range(3000))
        met = [_simulate(run, found, draw) <= slo_ms for run in runs]
        # rounding is conservative, and four standard deviations are enough for a fixed seed
        assert np.mean(met) >= policy.forecast(slo_ms).attainment - 4 * 0.5 / 3000**0.5


@pytest.mark.parametrize("slowest_ms", [3.0, 100.0, 1000.0])
def test_a_tight_slo_is_planned_as_finely_whatever_the_slowest_option_takes(slowest_ms: float) -> None:
    """A latency was rounded up to a thousandth of the slowest plan, so what fits did not run."""
    options = [option(0.7, 1.0), option(0.9, 1.3), option(0.95, slowest_ms)]
    found = pipeline({"a": stage(*options), "b": stage(*options)}, ("a", "b"))
    policy = DynamicPolicy(found, 0.95)
    assert Run(found, policy.begin(2.75), 2.75).start("a", 0.0).option == "o1"
    assert policy.forecast(2.75).accuracy == pytest.approx(0.81)
    assert policy.forecast(2.75).attainment == pytest.approx(1.0)
    assert policy.forecast(1e9).accuracy == pytest.approx(0.9025), "and the slowest have their grid"


@pytest.mark.slow
@given(pipelines(SEQUENTIAL), half_ms, st.sampled_from([0.5, 0.95]))
@some
def test_a_finer_grid_forecasts_the_same(found: Pipeline, slo_ms: float, attainment: float) -> None:
    """An option that takes too long for any of these SLOs changes only the grids."""
    first = found.stages[found.input]
    slow = replace(
        next(iter(first.options.values())), name="slow", accuracy=1.0, latency=Distribution.constant(400.0)
    )
    stages = {**found.stages, found.input: replace(first, options={**first.options, "slow": slow})}
    coarse = DynamicPolicy(found, attainment, late_worth=0.0).forecast(slo_ms)
    fine = DynamicPolicy(replace(found, stages=stages), attainment, late_worth=0.0).forecast(slo_ms)
    if coarse.attainment >= attainment:
        assert fine[:3] == pytest.approx(coarse[:3], abs=1e-6)


def test_time_saved_upstream_buys_accuracy_downstream() -> None:
    found = pipeline({"a": stage(option(0.9, 1, 5)), "b": stage(option(0.7, 2), option(0.95, 6))}, ("a", "b"))
    chosen = {}
    for elapsed_ms in (1.0, 5.0):
        run = Planner(found).begin(8.0)
        run.start("a", 0.0)
        run.finish("a", "x", elapsed_ms)
        chosen[elapsed_ms] = run.start("b", elapsed_ms).option
    assert chosen == {1.0: "o1", 5.0: "o0"}


def test_a_query_that_is_late_is_ended_soonest() -> None:
    followers = stage(option(0.7, 2), option(0.95, 3))
    run = Planner(pipeline({"a": stage(option(0.9, 9)), "b": followers}, ("a", "b"))).begin(5.0)
    run.start("a", 0.0)
    run.finish("a", "x", 9.0)
    step = run.start("b", 9.0)
    assert (step.option, step.budget_ms, step.remaining_ms) == ("o0", 0.0, -4.0)


def test_hard_inputs_get_the_large_network() -> None:
    """After a sure answer both options are right, and the small one is sooner; after an unsure one not."""
    found = pipeline({"a": stage(option(0.9, 1)), "b": stage(option(0.8, 1), option(0.85, 3))}, ("a", "b"))
    first, second = found.stages["a"], found.stages["b"]
    unit = Distribution.constant(1.0)
    split = {None: Behaviour((0.5, 0.5), (1.0, 0.8), (unit, unit))}
    root = replace(first.options["o0"], levels=(0.9,), behaviours=split)
    known = {
        name: replace(
            option,
            behaviours={
                Finding("o0", level): Behaviour((1.0,), (accuracy,), (option.measured_latency,))
                for level, accuracy in enumerate(accuracies)
            },
        )
        for (name, option), accuracies in zip(second.options.items(), [(0.99, 0.6), (0.99, 0.7)], strict=True)
    }
    stages = {"a": replace(first, options={"o0": root}), "b": replace(second, options=known)}
    planner = Planner(replace(found, stages=stages))
    chosen = {}
    for confidence in (0.95, 0.5, None):
        run = planner.begin(20.0)
        run.start("a", 0.0)
        run.finish("a", "x", 1.0, confidence)
        chosen[confidence] = run.start("b", 1.0).option
    assert chosen == {0.95: "o0", 0.5: "o1", None: "o1"}


def test_an_slo_beyond_all_latencies_takes_the_most_accurate() -> None:
    found = pipeline({"a": stage(option(0.9, 9), option(0.8, 1)), "b": stage(option(0.7, 2))}, ("a", "b"))
    assert Planner(found).begin(1e9).start("a", 0.0).option == "o0"


@pytest.mark.parametrize(
    ("edges", "problem"),
    [
        pytest.param(
            [("a", "b"), ("a", "c"), ("a", "d"), ("b", "e"), ("c", "e"), ("e", "f"), ("d", "f")],
            "share stage 'e'",
            id="two of three branches meet earlier",
        ),
    ],
)
def test_shapes_that_are_neither_chain_nor_fork_join(edges: list[tuple[str, str]], problem: str) -> None:
    names = sorted({name for edge in edges for name in edge})
    found = pipeline({name: stage(option(0.9, 1)) for name in names}, *edges)
    Planner(found, "proportional")
    with pytest.raises(PipelineError, match=problem):
        Planner(found, "dynamic")


def _brute_force(found: Pipeline, options: dict[str, str], slo_ms: float) -> tuple[float, float]:
    """(right in time, in time) of fixed options."""
    return _in_time(_outcomes(found, options), slo_ms)


def _in_time(outcomes: list[tuple[float, float, float]], slo_ms: float) -> tuple[float, float]:
    kept = [(weight, right) for weight, end_ms, right in outcomes if end_ms <= slo_ms]
    return sum(weight * right for weight, right in kept), sum(weight for weight, _ in kept)


def _outcomes(found: Pipeline, options: dict[str, str]) -> list[tuple[float, float, float]]:
    """(probability, when it ends, chance of being right) of all labels and latencies of all stages."""
    names = list(found.stages)
    chosen = [found.stages[name].options[options[name]] for name in names]
    latencies = [
        list(zip(one.measured_latency.values_ms, one.measured_latency.probabilities, strict=True))
        for one in chosen
    ]
    ways = [[(follow.targets, follow.share) for follow in follows(found)[name]] for name in names]
    outcomes = []
    for combination in product(*ways):
        taken = {name: way[0] for name, way in zip(names, combination, strict=True)}
        share = math.prod(way[1] for way in combination)
        for times in product(*latencies):
            ends = _ends(found, taken, {name: time[0] for name, time in zip(names, times, strict=True)})
            right = math.prod(
                one.measured_accuracy for name, one in zip(names, chosen, strict=True) if name in ends
            )
            outcomes.append((share * math.prod(time[1] for time in times), max(ends.values()), right))
    return outcomes


def _ends(found: Pipeline, taken: dict[str, tuple[str, ...]], times_ms: dict[str, float]) -> dict[str, float]:
    """When each stage that runs ends; a stage waits for all edges into it, those that do not hold as well."""
    ends: dict[str, float] = {}
    settled: dict[str, float] = {}  # when it ended, or was known to be skipped
    for name in found.stages:
        edges = found.edges_to[name]
        start = max((settled[edge.source] for edge in edges), default=0.0)
        runs = not edges or any(edge.source in ends and name in taken[edge.source] for edge in edges)
        settled[name] = start + (times_ms[name] if runs else 0.0)
        if runs:
            ends[name] = settled[name]
    return ends


def _simulate(run: Run, found: Pipeline, draw: random.Random) -> float:
    """Run stages as soon as they are ready, in parallel; the time of the answer."""
    running: list[tuple[float, str]] = []
    now_ms = 0.0
    while not run.done:
        for name in run.ready:
            step = run.start(name, now_ms)
            latency = found.stages[name].options[step.option].measured_latency
            taken_ms = draw.choices(latency.values_ms, latency.probabilities)[0]
            running.append((now_ms + taken_ms, name))
        now_ms, name = min(running)
        running.remove((now_ms, name))
        run.finish(name, draw.choices(found.stages[name].labels, found.stages[name].shares)[0], now_ms)
    return now_ms
