"""Pipelines whose models and replicas come and go: what is asked, what fails, what is planned with."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gati.errors import UnavailableError
from gati.pipelines import LivePlanner, LiveSettings, Pipeline
from gati.pipelines import Planner as PipelinePlanner
from services.scheduler.pipelines import ServedPipeline
from services.scheduler.replanning import Replanning
from services.scheduler.timing import Timing
from tests.pipelines.build import SHAPES, option, pipeline, stage


class Planner:
    """Takes down what it is told."""

    due = False

    def __init__(self) -> None:
        self.certified: list[str] = []
        self.agreed = self.lost = 0

    def certify(self, options: Any, counted: float | None, agreement: float | None) -> None:
        self.certified.append(str(counted))

    def audit(self, stage: str, option: str, *, agreed: int, lost: int) -> None:
        self.agreed += agreed
        self.lost += lost


class Counted:
    """A replica with the counts of its version."""

    ready = True

    def __init__(self, audits: int, losses: int = 0) -> None:
        version = SimpleNamespace(version="v1", audits=audits, losses=losses)
        self.info = SimpleNamespace(versions=[version])


def count(found: Any, audits: int, losses: int = 0) -> None:
    found.info.versions[0].audits += audits
    found.info.versions[0].losses += losses


class Model:
    """A model whose replicas the test changes."""

    ready = True

    def __init__(self, *replicas: Any) -> None:
        self.replicas = list(replicas)
        self.active = SimpleNamespace(version="v1", certificate_id="one", agreement=0.97)

    def certificate(self, version: str) -> dict[str, Any]:
        return {"n": 100, "losses": 1}


def test_only_audits_since_the_last_call_count_whichever_replicas_are_there() -> None:
    first, second = Counted(5000), Counted(5000, 10)
    model, planner = Model(first, second), Planner()
    replanning = Replanning(planner, {("a", "one"): model})  # type: ignore[arg-type,dict-item]
    replanning.take_in_audits()
    assert (planner.agreed, planner.lost) == (0, 0)
    count(first, 100, 60)
    replanning.take_in_audits()
    assert (planner.agreed, planner.lost) == (40, 60)
    second.ready = False
    replanning.take_in_audits()
    second.ready = True
    replanning.take_in_audits()
    model.replicas.append(Counted(7000, 7))  # scaled up: what it has counted is of earlier requests
    replanning.take_in_audits()
    assert (planner.agreed, planner.lost) == (40, 60) and planner.certified == ["0.99"]
    count(second, 10, 1)
    count(model.replicas[2], 5)
    replanning.take_in_audits()
    assert (planner.agreed, planner.lost) == (54, 61)


def test_replicas_that_are_gone_for_good_are_not_kept() -> None:
    """A model that scales up and down makes new ones for years."""
    model, planner = Model(Counted(0)), Planner()
    replanning = Replanning(planner, {("a", "one"): model})  # type: ignore[arg-type,dict-item]
    replanning.take_in_audits()
    gone = weakref.ref(model.replicas[0])
    model.replicas = [Counted(10)]
    replanning.take_in_audits()
    gc.collect()
    assert gone() is None


def test_another_certificate_of_the_version_counts_from_its_beginning() -> None:
    found = Counted(100)
    model, planner = Model(found), Planner()
    replanning = Replanning(planner, {("a", "one"): model})  # type: ignore[arg-type,dict-item]
    replanning.take_in_audits()
    model.active.certificate_id = "two"
    count(found, 50, 50)
    replanning.take_in_audits()
    assert planner.certified == ["0.99", "0.99"] and planner.lost == 0


class Branch:
    """The model of a stage; all models that fail do so in the same turn of the event loop."""

    available = ready = True

    def __init__(self, name: str, *, fails: bool) -> None:
        self.name, self._fails = name, fails
        self.woken = 0
        self.slos_ms: list[float | None] = []  # what was left for it, by query

    def wake(self) -> None:
        self.woken += 1

    async def infer(self, tensor: Any, asked: Any) -> Any:
        self.slos_ms.append(asked.latency_slo_ms)
        if self._fails:
            raise UnavailableError(f"{self.name} is away", retry_after_s=1.0)
        likely = np.array([0.9, 0.1], "<f4").tobytes()
        answer = SimpleNamespace(probabilities=likely, exit="base")
        return SimpleNamespace(answers=[answer], version="v1", latency_ms=1.0, queue_ms=0.0)


def test_branches_that_fail_together_make_one_error_and_leave_no_task_behind() -> None:
    found = pipeline(dict.fromkeys("abcd", stage(option(0.9, 1.0))), *SHAPES["fork and join"])
    models = {
        (name, each): Branch(name, fails=name in "bc")
        for name, one in found.stages.items()
        for each in one.options
    }
    complaints: list[Any] = []

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        served = ServedPipeline(found, PipelinePlanner(found, "static"), models, None)  # type: ignore[arg-type]
        with pytest.raises(UnavailableError, match="is away"):
            await served.answer(None, Timing(time.monotonic(), 1e4, 1e4, 0, ""))
        gc.collect()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(ask())
    assert complaints == []


def test_a_stage_is_answered_by_an_option_whose_model_is_there() -> None:
    found = pipeline({"a": stage(option(0.7, 1.0), option(0.9, 4.0))})
    small, large = (Branch(name, fails=name == "large") for name in ("small", "large"))
    large.available = large.ready = False
    answer = asyncio.run(serve_two(found, small, large).answer(None, in_time()))
    assert answer.stages[0]["model"] == "small" and not large.woken


def serve_two(
    found: Pipeline, small: Branch, large: Branch, planner: PipelinePlanner | LivePlanner | None = None
) -> ServedPipeline:
    models = dict(zip((("a", each) for each in found.stages["a"].options), (small, large), strict=True))
    return ServedPipeline(found, planner or PipelinePlanner(found, "static"), models, None)  # type: ignore[arg-type]


def in_time() -> Timing:
    return Timing(time.monotonic(), 1e4, 1e4, 0, "")


def test_no_query_waits_for_a_model_that_sleeps_while_another_option_is_ready() -> None:
    found = pipeline({"a": stage(option(0.7, 1.0), option(0.9, 4.0))})
    small, large = Branch("small", fails=False), Branch("large", fails=True)
    large.ready = False  # asleep: a start takes longer than any query has
    answer = asyncio.run(serve_two(found, small, large).answer(None, in_time()))
    assert answer.stages[0]["model"] == "small" and large.woken == 1
    small.ready = False
    with pytest.raises(UnavailableError, match="large is away"):  # both sleep: the plan's choice starts
        asyncio.run(serve_two(found, small, large).answer(None, in_time()))


def test_no_query_is_spent_on_exploring_a_model_that_sleeps() -> None:
    found = pipeline({"a": stage(option(0.9, 1.0), option(0.7, 4.0))})
    quick, slow = Branch("quick", fails=False), Branch("slow", fails=True)
    slow.ready = False
    planner = LivePlanner(found, "static", settings=LiveSettings(explore_every=4))
    served = serve_two(found, quick, slow, planner)

    async def ask() -> None:
        for _ in range(20):
            answer = await served.answer(None, in_time())
            assert answer.stages[0]["model"] == "quick"
        served.close()

    asyncio.run(ask())
    assert slow.woken > 0 and not slow.slos_ms


@pytest.mark.parametrize(
    ("shape", "least_s"),
    [
        ("one stage", 0),
        ("chain", 51),
        ("conditional tree", 1),  # c takes 1 s: whoever is sent there can be answered
        ("exclusive branches that meet", 2),
        ("a stage that may be left out", 1),
        ("fork and join", 51),  # both branches run
    ],
)
def test_a_query_is_refused_only_if_no_outcome_is_quick_enough(shape: str, least_s: int) -> None:
    """Stage b takes 50 s, all others take 1 s; a gets the SLO without the least time after it.

    The stages only say so. Seconds, because what this process waits for its turn counts as well.
    """
    edges = SHAPES[shape]
    names = sorted({"a", *(name for edge in edges for name in edge[:2])})
    slow = stage(option(0.9, 5e4))
    found = pipeline({name: slow if name == "b" else stage(option(0.9, 1e3)) for name in names}, *edges)
    models = {(name, "o0"): Branch(name, fails=False) for name in names}
    served = ServedPipeline(found, PipelinePlanner(found, "static"), models, None)  # type: ignore[arg-type]
    asyncio.run(served.answer(None, Timing(time.monotonic(), 1e6, 1e6, 0, "")))
    (left_ms,) = models["a", "o0"].slos_ms
    assert left_ms == pytest.approx(1e6 - 1e3 * least_s, abs=900)
