"""Planning with figures that follow the traffic: from none at all to options that change under way."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gati.errors import PipelineError
from gati.pipelines import (
    Behaviour,
    Distribution,
    EngineReport,
    Finding,
    LivePlanner,
    LiveSettings,
    Pipeline,
    Planner,
)
from gati.pipelines.dynamic import DynamicPolicy
from gati.pipelines.figures import Observation
from gati.pipelines.following import OptionReport
from tests.pipelines.build import SEQUENTIAL, option, pipeline, pipelines, stage

STILL = LiveSettings(explore_every=0)
Times = Callable[[str, str], float]  # stage and option -> milliseconds of its engine

two = stage(option(0.8, 2.0), option(0.9, 6.0))
chain = {"a": two, "b": two}


def query(
    planner: LivePlanner, slo_ms: float, times: Times, *, queue_ms: float = 0.0, way_ms: float = 0.0
) -> dict[str, str]:
    """Run one query, refreshing when it is due; the option of each stage that ran."""
    run = planner.begin(slo_ms)
    elapsed_ms = 0.0
    while not run.done:
        step = run.start(run.ready[0], elapsed_ms)
        engine_ms = times(step.stage, step.option)
        elapsed_ms += way_ms + queue_ms + engine_ms
        run.finish(step.stage, "x", elapsed_ms, served=EngineReport(engine_ms, queue_ms, "base"))
    if planner.due:
        planner.refresh()
    return {name: step.option for name, step in run.steps.items()}


def choices(planner: Planner | LivePlanner, offline: Pipeline, slos_ms: list[float]) -> list[tuple[str, ...]]:
    """The options that run at each SLO when every network takes its longest offline."""
    found = []
    for slo_ms in slos_ms:
        run, elapsed_ms = planner.begin(slo_ms), 0.0
        while not run.done:
            step = run.start(run.ready[0], elapsed_ms)
            latency = offline.stages[step.stage].options[step.option].measured_latency
            elapsed_ms += latency.values_ms[-1]
            run.finish(step.stage, "x", elapsed_ms)
        found.append(tuple(step.option for step in run.steps.values()))
    return found


SLOS = [0.7 + whole for whole in range(0, 30, 2)]


_quarter = {"x": 0.25, "y": 0.75}
_alike_when_late = pipeline(  # where all are late, the more accurate of the two is taken
    {
        "a": stage(option(0.5, 1.0), shares=_quarter),
        "b": stage(option(0.5, 1.0), shares=_quarter),
        "c": stage(option(0.5, 1.0, 3.0), option(0.51, 2.0), shares=_quarter),
    },
    ("a", "b"),
    ("b", "c"),
)


@pytest.mark.slow
@given(pipelines(SEQUENTIAL), st.randoms(use_true_random=False))
@example(_alike_when_late, random.Random(4))
@settings(max_examples=8, deadline=None)
def test_traffic_as_in_the_profile_plans_as_the_profile(found: Pipeline, draw: random.Random) -> None:
    """Latencies come in the profile's proportions, in any order: the plan is that of the profile."""
    planner = LivePlanner(found, settings=LiveSettings(half_life=1e9, explore_every=0, tolerance=0.0))
    for name, each in found.stages.items():
        seen = []
        for place, one in each.options.items():
            values = [value for value in one.measured_latency.values_ms for _ in range(12)]
            seen += [(place, value) for value in values]
        draw.shuffle(seen)
        for place, value in seen:
            label = draw.choices(each.labels, each.shares)[0]
            _observe(planner, name, place, value, label)
    planner.refresh()
    for name, each in found.stages.items():
        for place, one in each.options.items():
            now = planner.pipeline.stages[name].options[place]
            assert now.measured_accuracy == one.measured_accuracy
            for probability in (0.4, 0.6, 0.95):  # not where atoms end
                assert now.measured_latency.quantile_ms(probability) == pytest.approx(
                    one.measured_latency.quantile_ms(probability), abs=1e-6
                )
    # labels are drawn at random, so they came a little more or less often than in the profile
    stages = {
        name: replace(each, shares=planner.pipeline.stages[name].shares)
        for name, each in found.stages.items()
    }
    offline, live = (DynamicPolicy(each, 0.95) for each in (replace(found, stages=stages), planner.pipeline))
    for slo_ms in SLOS:
        # two plans may be worth the same and differ in what they trade
        assert live.forecast(slo_ms).worth == pytest.approx(offline.forecast(slo_ms).worth, abs=1e-6)


def test_traffic_as_in_the_profile_chooses_as_the_profile() -> None:
    stages = {  # no two are alike: there are no ties
        name: stage(option(0.9 - lost, 2.0, 2.5, 3.0), option(0.95, 6.0, 6.5, 9.0))
        for name, lost in (("a", 0.05), ("b", 0.13), ("c", 0.21))
    }
    found = pipeline(stages, ("a", "b"), ("b", "c"))
    planner = LivePlanner(found, settings=LiveSettings(half_life=1e9, explore_every=0, tolerance=0.0))
    for name, each in found.stages.items():
        for turn in range(60):
            for place, one in each.options.items():
                value = one.measured_latency.values_ms[turn % 3]
                _observe(planner, name, place, value, "xy"[turn % 2])
    assert planner.refresh() and planner.replans == 1
    assert choices(planner, found, SLOS) == choices(Planner(found), found, SLOS)
    assert len(set(choices(planner, found, SLOS))) >= 4


def _observe(planner: LivePlanner, name: str, place: str, engine_ms: float, label: str) -> None:
    planner._observe(name, Observation(place, label, None, 0, engine_ms, engine_ms, 0.0, "base"))


def test_before_any_traffic_the_plan_is_the_offline_plan() -> None:
    found = pipeline(chain, ("a", "b"))
    planner = LivePlanner(found)
    assert not planner.due and not planner.refresh()
    assert planner.pipeline is found and planner.replans == 0
    assert choices(planner, found, SLOS) == choices(Planner(found), found, SLOS)


def test_the_way_and_the_queue_are_part_of_a_stages_time() -> None:
    """Both large networks take 12 ms of 14; with a way of 2 ms for each stage they do not fit any more."""
    planner = LivePlanner(pipeline(chain, ("a", "b")), settings=STILL)
    networks = {"o0": 2.0, "o1": 6.0}
    assert query(planner, 14.0, lambda _, name: networks[name]) == {"a": "o1", "b": "o1"}
    for _ in range(200):
        last = query(planner, 14.0, lambda _, name: networks[name], queue_ms=0.5, way_ms=1.5)
    assert sorted(last.values()) == ["o0", "o1"]
    for each in planner.report():
        assert each.way_ms == pytest.approx(1.5, rel=0.02)
        if each.option == last[each.stage]:
            assert each.queue_ms == pytest.approx(0.5, rel=0.02)
            assert each.engine_ms == pytest.approx(networks[each.option])
            assert each.latency_ms == pytest.approx(2.0 + networks[each.option], rel=0.02)
        else:  # it is compared with the way included, though it has not run of late
            assert each.latency_ms > networks[each.option] + 1.4


@pytest.mark.parametrize("count", [90, 120])
def test_one_query_that_waited_for_a_start_leaves_the_plan_as_it_was(count: int) -> None:
    """The grid had to reach the half minute that it waited, and was too coarse for all other queries."""
    planner = LivePlanner(pipeline(chain, ("a", "b")), settings=STILL)
    networks = {"o0": 2.0, "o1": 6.0}
    for _ in range(count):
        usual = query(planner, 13.0, lambda _, name: networks[name])
    assert usual == {"a": "o1", "b": "o1"}
    query(planner, 13.0, lambda _, name: networks[name], queue_ms=3e4)
    before = planner.replans
    planner.refresh()
    assert planner.replans > before
    assert query(planner, 13.0, lambda _, name: networks[name]) == usual


def run_until(planner: LivePlanner, times: Times, wanted: str, most: int) -> int:
    """Queries until nine of ten run option `wanted` at stage b, at most `most`."""
    late: list[str] = []
    for count in range(1, most + 1):
        late.append(query(planner, 10.0, times)["b"])
        if len(late) >= 20 and Counter(late[-20:])[wanted] >= 18:
            return count
    raise AssertionError(f"{Counter(late[-100:])} after {most} queries")


@pytest.mark.slow
def test_traffic_leaves_an_option_that_slows_down_and_comes_back_when_it_is_fast_again() -> None:
    planner = LivePlanner(pipeline({"a": stage(option(0.9, 1.0)), "b": two}, ("a", "b")))
    usual = {("a", "o0"): 1.0, ("b", "o0"): 2.0, ("b", "o1"): 6.0}
    slow = usual | {("b", "o1"): 30.0}

    def fast(*key: str) -> float:
        return usual[key]  # type: ignore[index]

    def slowed(*key: str) -> float:
        return slow[key]  # type: ignore[index]

    run_until(planner, fast, "o1", 40)
    for _ in range(600):  # as much evidence as there can be
        query(planner, 10.0, fast)
    assert run_until(planner, slowed, "o0", 120) <= 120
    for _ in range(1500):  # for long
        query(planner, 10.0, slowed)
    assert run_until(planner, slowed, "o0", 20) == 20
    run_until(planner, fast, "o1", 2500)


def test_an_option_that_the_profile_calls_too_slow_is_found_out() -> None:
    """Offline it took 30 ms, perhaps on another machine; now it takes 3, and no plan would ever run it."""
    found = pipeline(
        {"a": stage(option(0.9, 1.0)), "b": stage(option(0.8, 2.0), option(0.95, 30.0))}, ("a", "b")
    )
    truth = {("a", "o0"): 1.0, ("b", "o0"): 2.0, ("b", "o1"): 3.0}
    run_until(LivePlanner(found), lambda *key: truth[key], "o1", 4000)
    never = LivePlanner(found, settings=STILL)
    for _ in range(500):
        assert query(never, 10.0, lambda *key: truth[key])["b"] == "o0"


def test_an_option_that_cannot_answer_does_not_take_the_turns_of_others() -> None:
    """It was chosen in every turn, counted as explored, and never ran; nor did the other."""
    three = stage(option(0.9, 1.0), option(0.8, 2.0), option(0.8, 2.0))
    planner = LivePlanner(pipeline({"a": three}), "static", settings=LiveSettings(explore_every=4))
    ran: Counter[str] = Counter()
    for _ in range(40):
        run = planner.begin(100.0)
        step = run.start("a", 0.0, usable=("o0", "o1"))
        assert step.wanted == step.option
        ran[step.option] += 1
        run.finish("a", "x", 2.0)
    explored = {each.option: each.explored for each in planner.report()}
    assert ran["o1"] == explored["o1"] >= 8 and explored["o0"] == explored["o2"] == 0


def test_an_option_that_never_answers_is_explored_no_more_often_than_others() -> None:
    """After its first turn it was due in every turn: only answers were counted."""
    found = pipeline({"a": stage(option(0.9, 1.0), option(0.8, 30.0))})
    planner = LivePlanner(found, "static", settings=LiveSettings(explore_every=4))
    for _ in range(66):
        run = planner.begin(10.0)  # the other one takes 30 ms: it is explored every 16 queries
        step = run.start("a", 0.0)
        if step.explores:
            assert (step.option, step.planned) == ("o1", "o0")
            assert run.fall_back("a", 5.0).option == "o0"
        run.finish("a", "x", 6.0)
    assert _report(planner, "o1").explored == 4


def test_a_stage_that_falls_back_is_timed_from_then_on() -> None:
    planner = LivePlanner(pipeline({"a": two}), "static", settings=LiveSettings(explore_every=1))
    run = planner.begin(100.0)
    with pytest.raises(PipelineError, match="stage 'a' does not run an explored option"):
        run.fall_back("a", 0.0)
    run.start("a", 0.0)
    with pytest.raises(PipelineError, match="stage 'a' does not run an explored option"):
        run.fall_back("a", 0.0)
    run.finish("a", "x", 6.0)
    run = planner.begin(100.0)
    assert run.start("a", 0.0).explores
    assert run.fall_back("a", 40.0).remaining_ms == 60.0
    run.finish("a", "x", 47.0, served=EngineReport(6.0, 0.0, "base"))
    with pytest.raises(PipelineError, match="stage 'a' does not run an explored option"):
        run.fall_back("a", 50.0)
    reports = {each.option: each for each in planner.report()}
    assert (reports["o0"].chosen, reports["o1"].chosen) == (0, 2)
    assert reports["o1"].way_ms == pytest.approx(0.5, rel=0.05)


def test_a_sleeping_option_is_woken_and_then_explored() -> None:
    three = stage(option(0.9, 1.0), option(0.8, 2.0))
    planner = LivePlanner(pipeline({"a": three}), "static", settings=LiveSettings(explore_every=8))
    seen = []
    for number in range(12):
        run = planner.begin(100.0)
        awake = number >= 10
        step = run.start("a", 0.0, ("o0", "o1") if awake else ("o0",), () if awake else ("o1",))
        seen.append((step.option, step.wanted))
        run.finish("a", "x", 1.0)
    assert seen == [("o0", "o0")] * 8 + [("o0", "o1")] * 2 + [("o1", "o1"), ("o0", "o0")]
    assert _report(planner, "o1").explored == 1
    all_asleep = planner.begin(100.0).start("a", 0.0, ("o0", "o1"), ("o0", "o1"))
    assert all_asleep.option == all_asleep.wanted == "o0"


def test_an_option_that_became_slow_takes_the_place_of_none() -> None:
    """Who stands in for an option that is away was chosen by the offline figures."""
    three = stage(option(0.7, 1.0), option(0.8, 2.0), option(0.9, 3.0))
    planner = LivePlanner(pipeline({"a": three}), "static", settings=STILL)
    assert planner.begin(10.0).start("a", 0.0, ("o0", "o1")).option == "o1"
    for _ in range(300):
        _observe(planner, "a", "o1", 60.0, "x")
    planner.refresh()
    assert planner.begin(10.0).start("a", 0.0, ("o0", "o1")).option == "o0"


@pytest.mark.slow
def test_exploring_takes_a_small_and_steady_share() -> None:
    planner = LivePlanner(pipeline(chain, ("a", "b")), settings=LiveSettings(explore_every=50))
    networks = {"o0": 2.0, "o1": 6.0}
    for _ in range(2000):
        query(planner, 40.0, lambda _, name: networks[name])
    explored = {(each.stage, each.option): each.explored for each in planner.report()}
    assert {key: 30 <= count <= 40 for key, count in explored.items() if key[1] == "o0"} == {
        ("a", "o0"): True,
        ("b", "o0"): True,
    }


def test_evidence_that_nothing_renews_gives_way_to_the_offline_figures() -> None:
    found = pipeline({"a": two}, *())
    planner = LivePlanner(found, settings=STILL)
    for _ in range(100):
        _observe(planner, "a", "o1", 60.0, "x")
    assert _report(planner, "o1").prior_share < 0.05
    for _ in range(4000):
        _observe(planner, "a", "o0", 2.0, "x")
    planner.refresh()
    assert _report(planner, "o1").prior_share > 0.95
    assert _report(planner, "o1").latency_ms == pytest.approx(6.0, rel=0.1)
    assert _report(planner, "o0").prior_share == 0.0


def _report(planner: LivePlanner, name: str) -> OptionReport:
    return next(each for each in planner.report() if each.option == name)


def test_audits_move_what_is_expected_and_not_what_is_promised() -> None:
    planner = LivePlanner(pipeline({"a": two}), settings=STILL)
    assert _report(planner, "o1").agreement is None
    planner.certify([("a", "o1")], 0.98, 0.97)
    certified = _report(planner, "o1").agreement
    assert certified == (pytest.approx(0.98), 0.98, 0.97, 0.0)
    assert certified.based_on == "the certificate"
    planner.refresh()
    assert _report(planner, "o1").accuracy == pytest.approx(0.9)
    planner.audit("a", "o1", agreed=300, lost=300)
    planner.refresh()
    audited = _report(planner, "o1")
    assert audited.agreement is not None
    expected = (256 * 0.98 + 300) / (256 + 600)
    assert audited.agreement.expected == pytest.approx(expected)
    assert audited.agreement.promised == 0.97
    assert audited.agreement.based_on == "the certificate and 600 audits"
    assert audited.accuracy == pytest.approx(0.9 - (0.98 - expected))
    run = planner.begin(20.0)
    assert run.start("a", 0.0).option == "o0"  # 80 % right, and faster
    planner.certify([("a", "o1")], 0.99, 0.98)  # another version: its audits begin anew
    planner.refresh()
    assert _report(planner, "o1").accuracy == pytest.approx(0.9)
    planner.certify([("a", "o1")], 0.5, 0.4)  # so often different, and nine of ten right: few matter here
    planner.audit("a", "o1", agreed=0, lost=256)
    planner.refresh()
    assert _report(planner, "o1").accuracy == pytest.approx(0.9 - 0.25 * 0.1 / 0.5)
    with pytest.raises(PipelineError, match="no stage 'a' with option 'o7'"):
        planner.audit("a", "o7", agreed=1, lost=0)


def levelled(*others: dict[str, Any]) -> Pipeline:
    """Half of the answers of the first option are sure and take 1 ms, half take 8 ms."""
    found = pipeline({"a": stage(option(0.9, 1.0, 8.0), *others)})
    one = found.stages["a"].options["o0"]
    split = Behaviour((0.5, 0.5), (0.99, 0.81), (Distribution.constant(1.0), Distribution.constant(8.0)))
    options = {**found.stages["a"].options, "o0": replace(one, levels=(0.9,), behaviours={None: split})}
    return replace(found, stages={"a": replace(found.stages["a"], options=options)})


def test_an_option_that_gets_hard_inputs_is_not_called_bad_for_it() -> None:
    """A tenth of all answers differ, twice as many of unsure ones: audits that say so change nothing."""
    planner = LivePlanner(levelled(), settings=STILL)
    planner.certify([("a", "o0")], 0.9, 0.88)
    for _ in range(300):
        planner._observe("a", Observation("o0", "x", None, 1, 8.0, 8.0, 0.0, "base"))
    planner.audit("a", "o0", agreed=810, lost=190)
    planner.refresh()
    agreement = _report(planner, "o0").agreement
    assert agreement is not None and agreement.usual == pytest.approx(0.81, abs=0.001)
    assert _report(planner, "o0").accuracy == pytest.approx(0.9, abs=0.001)
    planner.audit("a", "o0", agreed=0, lost=500)
    planner.refresh()
    assert _report(planner, "o0").accuracy < 0.8


def test_hits_that_become_rare_make_the_option_slow() -> None:
    """Half of the answers were sure and took 1 ms, now a tenth are; confidence and latency go together."""
    planner = LivePlanner(levelled(option(0.85, 4.0)), settings=STILL)
    draw = random.Random(0)
    for _ in range(400):
        hit = draw.random() < 0.1
        run = planner.begin(20.0)
        run.start("a", 0.0)
        took_ms = 1.0 if hit else 8.0
        run.finish(
            "a", "x", took_ms, 0.95 if hit else 0.5, EngineReport(took_ms, 0.0, "input" if hit else "base")
        )
    planner.refresh()
    now = planner.pipeline.stages["a"].options["o0"].behaviour()
    assert now.shares == (pytest.approx(0.1, abs=0.05), pytest.approx(0.9, abs=0.05))
    assert _report(planner, "o0").hit_rate == pytest.approx(0.1, abs=0.05)
    assert _report(planner, "o0").latency_ms == pytest.approx(7.3, abs=0.4)


def test_threads_lose_no_observation() -> None:
    planner = LivePlanner(pipeline(chain, ("a", "b")), "static")
    networks = {"o0": 2.0, "o1": 6.0}

    def work() -> None:
        for _ in range(200):
            query(planner, 20.0, lambda _, name: networks[name])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sum(each.chosen for each in planner.report()) == 2 * 4 * 200


@pytest.mark.parametrize("policy", ["static", "equal", "proportional"])
def test_every_policy_can_follow(policy: str) -> None:
    planner = LivePlanner(pipeline({"a": two}), policy, settings=STILL)
    assert query(planner, 7.0, lambda *_: 6.0)["a"] == "o1"
    for _ in range(300):
        last = query(planner, 7.0, lambda _, name: {"o0": 2.0, "o1": 9.0}[name])
    assert last["a"] == "o0"


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(PipelineError, match="half_life is 0; give a number of queries above zero"):
        LiveSettings(half_life=0)
    with pytest.raises(PipelineError, match="explore_every is -1"):
        LiveSettings(explore_every=-1)


def followed(first: Behaviour, second: dict[Finding | None, Behaviour]) -> Pipeline:
    """A chain of two stages with one option each, whose answers have two levels."""
    found = pipeline({"a": stage(option(0.9, 2.0)), "b": stage(option(0.9, 2.0))}, ("a", "b"))
    stages = {}
    for (name, one), behaviours in zip(found.stages.items(), ({None: first}, second), strict=True):
        both = Distribution.from_samples([each.mean_ms for each in behaviours[None].latencies])
        option_now = replace(one.options["o0"], levels=(0.9,), behaviours=behaviours, latency=both)
        stages[name] = replace(one, options={"o0": option_now})
    return replace(found, stages=stages)


def levels(sure: float, *latency_ms: float) -> Behaviour:
    return Behaviour((sure, 1.0 - sure), (0.9, 0.9), tuple(map(Distribution.constant, latency_ms)))


def test_another_course_after_a_finding_is_planned_with() -> None:
    """As many answers are sure as before, but not after the same findings: the plan stayed as it was."""
    sure, unsure = Finding("o0", 0), Finding("o0", 1)
    after = {None: levels(0.5, 2.0, 2.0), sure: levels(0.9, 2.0, 2.0), unsure: levels(0.1, 2.0, 2.0)}
    planner = LivePlanner(followed(levels(0.5, 2.0, 2.0), after), "static", settings=STILL)

    def traffic(count: int, alike: float) -> None:
        for number in range(count):
            level = number % 2
            same = (number // 2) % 10 < 10 * alike
            for name, before, own in (("a", None, level), ("b", Finding("o0", level), level)):
                mine = own if same or before is None else 1 - own
                planner._observe(name, Observation("o0", "xy"[level], before, mine, 2.0, 2.0, 0.0, "base"))

    traffic(1000, 0.9)
    planner.refresh()
    before = planner.replans
    traffic(2000, 0.9)
    assert not planner.refresh() and planner.replans == before
    traffic(3000, 0.1)
    assert planner.refresh()
    now = planner.pipeline.stages["b"].options["o0"]
    assert now.behaviour().shares == pytest.approx((0.5, 0.5), abs=0.05)
    assert now.behaviour(sure).shares == pytest.approx((0.1, 0.9), abs=0.05)


def test_latencies_of_levels_that_change_in_opposite_directions_are_planned_with() -> None:
    planner = LivePlanner(
        followed(levels(0.5, 1.0, 3.0), {None: levels(0.5, 1.0, 3.0)}), "static", settings=STILL
    )
    for number in range(3000):
        level, took_ms = number % 2, (3.0, 1.0)[number % 2]
        planner._observe("a", Observation("o0", "xy"[level], None, level, took_ms, took_ms, 0.0, "base"))
    assert planner.refresh()
    now = planner.pipeline.stages["a"].options["o0"].behaviour()
    assert [each.mean_ms for each in now.latencies] == pytest.approx([3.0, 1.0])
