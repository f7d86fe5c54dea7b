"""Queries on their way: what is ready, what is skipped, and budgets under every policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import DataError, PipelineError
from gati.pipelines import Choice, LabelMap, Pipeline, Plan, Planner, policy_names, register_policy
from gati.pipelines.planner import Run
from tests.pipelines.build import SEQUENTIAL, option, pipeline, pipelines, stage

POLICIES = ("dynamic", "equal", "proportional", "static")

one = stage(option(0.8, 1.0), option(0.9, 4.0))


def test_conditions_choose_what_runs_and_skipping_goes_on() -> None:
    edges = [("a", "b", "x"), ("a", "c", "y"), ("b", "d"), ("d", "e"), ("c", "e")]
    run = Planner(pipeline(dict.fromkeys("abcde", one), *edges), "equal").begin(10.0)
    assert (run.ready, run.done, run.answer) == (("a",), False, None)
    run.start("a", 0.0)
    run.finish("a", "y", 1.0)
    assert (run.ready, run.skipped) == (("c",), {"b", "d"})
    run.start("c", 1.0)
    run.finish("c", "x", 2.0)
    run.start("e", 2.0)
    run.finish("e", "y", 3.0)
    assert (run.done, run.output, run.answer, run.ready) == (True, "e", "y", ())


@pytest.mark.slow
def test_a_join_waits_for_all_branches() -> None:
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")]
    run = Planner(pipeline(dict.fromkeys("abcd", one), *edges)).begin(20.0)
    run.start("a", 0.0)
    run.finish("a", "x", 1.0)
    assert set(run.ready) == {"b", "c"}
    for name in ("b", "c"):
        run.start(name, 1.0)
    run.finish("b", "x", 2.0)
    assert run.ready == ()
    run.finish("c", "x", 3.0)
    assert run.ready == ("d",)


def test_misuse_is_told() -> None:
    run = Planner(pipeline({"a": one, "b": one}, ("a", "b")), "static").begin(10.0)
    with pytest.raises(PipelineError, match="stage 'b' cannot start now; ready: a"):
        run.start("b", 0.0)
    with pytest.raises(PipelineError, match="stage 'a' is not running; start it first"):
        run.finish("a", "x", 1.0)
    run.start("a", 0.0)
    with pytest.raises(PipelineError, match="stage 'a' has no label 'z'; its labels are x, y"):
        run.finish("a", "z", 1.0)
    with pytest.raises(PipelineError, match="latency_slo_ms is 0; give milliseconds above zero"):
        Planner(pipeline({"a": one}), "static").begin(0)
    with pytest.raises(PipelineError, match=r"attainment is 1.0; give a share between 0 and 1"):
        Planner(pipeline({"a": one}), "static", attainment=1.0)
    with pytest.raises(PipelineError, match="no policy 'best'; choose one of .*dynamic, equal, proportional"):
        Planner(pipeline({"a": one}), "best")


def test_published_splits_by_hand() -> None:
    slow = stage(option(0.8, 2.0), option(0.9, 6.0))
    found = pipeline({"a": one, "b": slow, "c": one}, ("a", "b"), ("b", "c"))
    assert Planner(found, "equal").begin(12.0).start("a", 0.0).budget_ms == pytest.approx(4.0)
    assert Planner(found, "proportional").begin(14.0).start("a", 0.0)[1:3] == ("o1", pytest.approx(4.0))
    run = Planner(found, "equal").begin(12.0)
    run.start("a", 0.0)
    run.finish("a", "x", 1.0)  # 3 saved, of which half is for each stage that follows
    assert run.start("b", 1.0)[1:3] == ("o0", pytest.approx(5.5))
    run.finish("b", "x", 2.0)
    assert run.start("c", 2.0)[1:3] == ("o1", pytest.approx(10.0))


def test_the_least_over_the_paths() -> None:
    """Equal split: a is on a path of two stages and on one of four; the longer one decides."""
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")]
    found = pipeline(dict.fromkeys("abcd", one), *edges)
    assert Planner(found, "equal").begin(8.0).start("a", 0.0).budget_ms == pytest.approx(2.0)


def test_a_policy_of_ones_own() -> None:
    class Slowest:
        def __init__(self, pipeline: Pipeline, attainment: float) -> None:
            self.last = {name: list(stage.options)[-1] for name, stage in pipeline.stages.items()}

        def begin(self, latency_slo_ms: float) -> Plan:
            return self

        def choose(self, stage: str, remaining_ms: float, finding: object = None) -> Choice:
            return Choice(self.last[stage], remaining_ms)

    if "slowest-of-test" not in policy_names():
        register_policy("slowest-of-test")(Slowest)
    assert Planner(pipeline({"a": one}), "slowest-of-test").begin(1.0).start("a", 0.0).option == "o1"
    with pytest.raises(PipelineError, match="a policy named 'slowest-of-test' is registered already"):
        register_policy("slowest-of-test")(Slowest)


@pytest.mark.slow
@given(pipelines(), st.sampled_from(POLICIES), st.floats(0.5, 40.0), st.data())
@settings(max_examples=30, deadline=None)
def test_stages_that_keep_their_budgets_keep_the_slo(
    found: Pipeline, policy: str, slo_ms: float, data: st.DataObject
) -> None:
    """Whatever part of its budget each takes, and whichever labels come."""
    run = Planner(found, policy).begin(slo_ms)
    spent = _walk(run, found, data, st.floats(0.0, 1.0))
    assert spent <= slo_ms * (1 + 1e-9)


@pytest.mark.slow
@given(pipelines(SEQUENTIAL), st.sampled_from(POLICIES), st.floats(0.5, 40.0), st.data())
@settings(max_examples=30, deadline=None)
def test_every_query_ends_with_an_answer_and_no_budget_is_below_zero(
    found: Pipeline, policy: str, slo_ms: float, data: st.DataObject
) -> None:
    run = Planner(found, policy).begin(slo_ms)
    _walk(run, found, data, st.floats(0.0, 5.0))  # budgets may be overrun
    assert run.answer in found.stages[str(run.output)].labels
    assert all(step.budget_ms >= 0.0 for step in run.steps.values())
    assert set(run.labels) | run.skipped == set(found.stages)
    assert not run.ready


def _walk(run: Run, found: Pipeline, data: st.DataObject, part: st.SearchStrategy[float]) -> float:
    """Run all that is ready side by side; return when the answer came."""
    running: list[tuple[float, str]] = []
    now_ms = 0.0
    while not run.done:
        for name in run.ready:
            step = run.start(name, now_ms)
            assert step.budget_ms >= 0.0
            running.append((now_ms + step.budget_ms * data.draw(part), name))
        now_ms, name = min(running)
        running.remove((now_ms, name))
        run.finish(name, data.draw(st.sampled_from(found.stages[name].labels)), now_ms)
    return now_ms


def test_labels_from_probabilities() -> None:
    classes = ["car", "cat", "ship", "dog"]
    groups = LabelMap.from_groups({"vehicle": ["car", "ship"], "animal": ["cat"]}, classes)
    found = groups([0.2, 0.35, 0.2, 0.25])
    assert found == ("vehicle", pytest.approx(0.4 / 0.75), 0.35)  # a dog is neither, the rest is renormalised
    assert groups.by_class.tolist() == [0, 1, 0, -1]
    other_order = LabelMap.from_groups({"vehicle": ["ship", "car"], "animal": ["cat"]}, classes)
    assert other_order.by_label == groups.by_label == {"vehicle": (0, 2), "animal": (1,)}
    assert groups([0.0, 0.0, 0.0, 1.0]).label == "vehicle"
    rows = np.array([[0.2, 0.35, 0.2, 0.25], [0.0, 1.0, 0.0, 0.0]])
    assert groups.rows(rows).tolist() == [0, 1]
    with pytest.raises(DataError, match=r"an answer has shape \[3\] but the pipeline names 4 classes"):
        groups([0.2, 0.3, 0.5])


def test_an_option_that_cannot_answer_is_not_chosen() -> None:
    two = stage(option(0.7, 1.0), option(0.8, 2.0), option(0.9, 4.0))
    found = pipeline({"a": two}, *[])
    names = list(found.stages["a"].options)
    assert Planner(found, "static").begin(20.0).start("a", 0.0).option == names[2]
    for slo_ms, usable, expected in (
        (20.0, names[:2], names[1]),
        (1.5, names[1:], names[1]),
        (20.0, names, names[2]),
        (20.0, [], names[2]),  # none: whatever is planned
    ):
        run = Planner(found, "static").begin(slo_ms)
        assert run.start("a", 0.0, usable).option == expected
        run.finish("a", "x", 1.0)
        assert run.done


def test_without_enough_time_the_fastest_usable_option_is_taken() -> None:
    found = pipeline({"a": stage(option(0.7, 1.0), option(0.9, 4.0), option(0.8, 3.0))}, *[])
    names = list(found.stages["a"].options)
    assert Planner(found, "static").begin(1.2).start("a", 0.0, names[1:]).option == names[2]


def test_of_equally_accurate_options_the_faster_takes_the_place_of_another() -> None:
    """The first one of the file did, though it took longer."""
    found = pipeline({"a": stage(option(0.9, 2.0), option(0.8, 3.0), option(0.8, 1.0))}, *[])
    assert Planner(found, "static").begin(20.0).start("a", 0.0, ("o1", "o2")).option == "o2"


def test_what_takes_the_place_of_an_option_leaves_time_for_later_stages() -> None:
    """8 ms of 10 were taken for the first stage, though the second one needs 5."""
    first = stage(option(0.7, 2.0), option(0.8, 8.0), option(0.9, 3.0))
    found = pipeline({"a": first, "b": stage(option(0.9, 5.0), option(0.95, 9.0))}, ("a", "b"))
    for slo_ms, expected in ((10.0, "o0"), (13.5, "o1")):
        run = Planner(found, "static").begin(slo_ms)
        assert run.start("a", 0.0, ("o0", "o1")).option == expected


@pytest.mark.parametrize(
    ("usable", "asleep", "option_of", "wanted"),
    [
        ((0, 1, 2), (), 2, 2),
        ((0, 1), (2,), 1, 2),
        ((0,), (1,), 0, 1),  # what is planned has gone; of the others, the most accurate one sleeps
        ((1,), (0,), 1, 1),
        ((0, 1), (0, 1), 1, 1),  # all sleep
        ((), (), 2, 2),
    ],
)
def test_an_option_that_sleeps_is_wanted_and_not_run(
    usable: tuple[int, ...], asleep: tuple[int, ...], option_of: int, wanted: int
) -> None:
    found = pipeline({"a": stage(option(0.7, 1.0), option(0.8, 2.0), option(0.9, 4.0))}, *[])
    names = list(found.stages["a"].options)
    run = Planner(found, "static").begin(20.0)
    step = run.start("a", 0.0, [names[each] for each in usable], [names[each] for each in asleep])
    assert (step.option, step.wanted) == (names[option_of], names[wanted])
