"""Which queries a pipeline refuses at once, and what a query that explores an option risks."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.requests import Request

from gati.errors import CancelledError, DeadlineError, GatiError, OverloadError, UnavailableError
from gati.pipelines import LivePlanner, LiveSettings, Pipeline, Planner
from services.config import ServeConfig
from services.scheduler.entrance import CrowdedError, Demand
from services.scheduler.later import LaterStages
from services.scheduler.pipeline_routes import answer, router
from services.scheduler.pipelines import ServedPipeline
from services.scheduler.replicas import Asked
from services.scheduler.scheduler import Scheduler
from services.scheduler.timing import Timing
from tests.pipelines.build import option, pipeline, stage
from tests.services.running import png
from tests.waiting import LONG_S, in_the_end

HOUR_MS = 3.6e6  # long enough that what this process waits for its turn does not matter
CLOSE_MS = 1e5


class Model:
    """A model that answers at once, unless `refuses` has an error for a request or it holds answers back."""

    available = ready = True
    info: Any = None

    def __init__(self, name: str, refuses: Callable[[Asked], GatiError | None] = lambda asked: None) -> None:
        self.name = name
        self.asked: list[Asked] = []
        self.refusals: list[Any] = []
        self.dispatcher = SimpleNamespace(on_outcome=self.refusals.append)
        self.holds = asyncio.Event()
        self.holds.set()
        self._refuses = refuses

    async def infer(self, tensor: Any, asked: Asked) -> Any:
        self.asked.append(asked)
        if (error := self._refuses(asked)) is not None:
            raise error
        await self.holds.wait()
        answer = SimpleNamespace(probabilities=np.array([0.9, 0.1], "<f4").tobytes(), exit="base")
        return SimpleNamespace(answers=[answer], version="v1", latency_ms=1.0, queue_ms=0.0)


def chain(later_ms: float = 1.0) -> Pipeline:
    return pipeline({"a": stage(option(0.9, 1.0)), "b": stage(option(0.9, later_ms))}, ("a", "b"))


def serve(found: Pipeline, *models: Model, planner: Planner | LivePlanner | None = None) -> ServedPipeline:
    """One model for each option, in the order of the file."""
    options = [(name, each) for name, one in found.stages.items() for each in one.options]
    return ServedPipeline(
        found,
        planner or Planner(found, "static"),
        dict(zip(options, models, strict=True)),  # type: ignore[arg-type]
        None,
    )


def timing(slo_ms: float = HOUR_MS) -> Timing:
    return Timing(time.monotonic(), slo_ms, 2.0 * slo_ms, 2, "")


def test_images_are_read_as_any_model_takes_them() -> None:
    """Those for grey networks were read in colour, and refused, while the first model was away."""
    away, there = Model("a"), Model("b")
    there.info = SimpleNamespace(image_shape=[6, 6, 1])
    assert serve(pipeline({"a": stage(option(0.9, 1.0), option(0.9, 1.0))}), away, there).channels == 1


def test_the_first_stage_leaves_a_query_its_time_outside_the_services() -> None:
    """The way took a third of some SLOs, and the first stage might take all but the second stage's time."""
    first = Model("a")
    served = serve(chain(HOUR_MS / 4), first, Model("b"))
    asyncio.run(served.answer(None, timing(), None, HOUR_MS / 8))
    asyncio.run(served.answer(None, timing(), None))
    left_ms = [asked.latency_slo_ms for asked in first.asked]
    assert left_ms == [
        pytest.approx(HOUR_MS * (1 - 1 / 4 - 1 / 8), abs=CLOSE_MS),
        pytest.approx(HOUR_MS * (1 - 1 / 4), abs=CLOSE_MS),
    ]


def test_the_time_outside_the_services_is_that_of_other_queries() -> None:
    async def ask() -> None:
        first = Model("a")
        first.holds.clear()
        scheduler = Scheduler(ServeConfig(), {}, {"p": serve(chain(), first, Model("b"))})
        scheduler.entrance("pipelines/p").outside.value = HOUR_MS / 8
        app = FastAPI()
        app.include_router(router)
        app.state.scheduler = scheduler
        url = f"/v1/pipelines/p/query?latency_slo_ms={HOUR_MS}"
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=LONG_S) as client:
            asking = []
            for count in (1, 2):
                scheduler.check_lag(url)
                asking.append(asyncio.create_task(client.post(url, content=png())))
                await in_the_end(lambda count=count: len(first.asked) == count)
            first.holds.set()
            assert [each.status_code for each in await asyncio.gather(*asking)] == [200, 200]
        alone_ms, other_ms = [asked.latency_slo_ms or 0.0 for asked in first.asked]
        assert alone_ms - other_ms == pytest.approx(HOUR_MS / 8, abs=CLOSE_MS)

    asyncio.run(ask())


def test_live_figures_foresee_the_way_to_later_stages() -> None:
    """It would count twice: in the figures of these stages and in the time outside the services."""
    found = chain()
    stages = [
        {"stage": "a", "started_ms": 1.0, "latency_ms": 10.0, "service_ms": 8.0},
        {"stage": "b", "started_ms": 12.0, "latency_ms": 6.0, "service_ms": 5.0},
    ]
    for planner, foreseen_ms in ((Planner(found), 8.0 + 5.0), (LivePlanner(found), 8.0 + 6.0)):
        served = serve(found, Model("a"), Model("b"), planner=planner)
        assert served.foreseen_ms(stages) == pytest.approx(foreseen_ms)


def test_one_query_that_waited_long_does_not_refuse_those_after_it() -> None:
    """The mean was above the SLO for hundreds of queries, and none of them came to correct it."""
    found = pipeline(
        {"a": stage(option(0.9, 1.0)), "b": stage(option(0.9, *[1.0] * 99, HOUR_MS))}, ("a", "b")
    )
    assert LaterStages(Planner(found, "static")).least_ms == 1.0


def test_a_refusal_says_what_takes_the_slo() -> None:
    """It was "expected to take 1.6 ms, but 0.0 ms are left" for an SLO of 5 ms."""
    error = OverloadError("expected to take 1.6 ms, but 0.0 ms of the SLO are left", retry_after_s=2.0)
    served = serve(chain(2.0 * HOUR_MS), Model("a", lambda asked: error), Model("b"))
    why = f"stages after 'a' take at least {2.0 * HOUR_MS:.1f} ms: too long for the SLO of 3600000 ms"
    with pytest.raises(OverloadError, match=why) as raised:
        asyncio.run(served.answer(None, timing()))
    assert raised.value.retry_after_s == 2.0


def test_figures_that_refuse_every_query_are_doubted() -> None:
    """After a stall of a later stage all queries were refused, and nothing corrected its figures."""

    def short(asked: Asked) -> GatiError | None:
        left_ms = HOUR_MS if asked.latency_slo_ms is None else asked.latency_slo_ms
        return OverloadError("too late", retry_after_s=1.0) if left_ms < 0.0 else None

    served = serve(chain(2.0 * HOUR_MS), Model("a", short), Model("b"))

    async def ask() -> list[bool]:
        answered = []
        for _ in range(60):
            try:
                await served.answer(None, timing())
                answered.append(True)
            except OverloadError:
                answered.append(False)
        return answered

    answered = asyncio.run(ask())
    assert not any(answered[:20]) and all(answered[30:])


def test_doubt_ends_with_a_query_that_is_late() -> None:
    later = LaterStages(Planner(chain(100.0)))
    for _ in range(20):
        later.refused()
    assert later.least_ms == 100.0
    later.admitted()
    for _ in range(25):
        later.refused()
    assert later.least_ms == pytest.approx(100.0 * 0.9**5)
    later.late()
    assert later.least_ms == 100.0


def test_doubt_ends_with_a_query_that_is_answered_late() -> None:
    served = serve(chain(100.0), Model("a"), Model("b"))
    for _ in range(30):
        served._later.refused()
    asyncio.run(served.answer(None, timing()))
    assert served._later.least_ms < 100.0
    late = Timing(time.monotonic() - 10.0, 5e3, HOUR_MS, 2, "")
    asyncio.run(served.answer(None, late))
    assert served._later.least_ms == 100.0


@pytest.mark.parametrize("error", [DeadlineError("late"), OverloadError("full", retry_after_s=1.0)])
def test_doubt_ends_with_a_query_that_a_later_stage_does_not_answer(error: GatiError) -> None:
    served = serve(chain(100.0), Model("a"), Model("b", lambda asked: error))
    for _ in range(30):
        served._later.refused()
    with pytest.raises(type(error)):
        asyncio.run(served.answer(None, timing()))
    assert served._later.least_ms == 100.0


@pytest.mark.parametrize(
    "error",
    [
        OverloadError("expected to take 40 ms", retry_after_s=1.0),
        DeadlineError("the deadline passed while the network ran"),
        UnavailableError("it has just died", retry_after_s=1.0),
    ],
)
def test_a_query_that_explores_an_option_in_vain_is_answered_as_planned(error: GatiError) -> None:
    """With an SLO for which the option is too slow, each query that explored it was refused or timed out."""
    found = pipeline({"a": stage(option(0.9, 1.0), option(0.7, 4.0))})
    quick, slow = Model("quick"), Model("slow", lambda asked: error)
    planner = LivePlanner(found, "static", settings=LiveSettings(explore_every=4))
    served = serve(found, quick, slow, planner=planner)

    async def ask() -> None:
        for _ in range(20):
            (report,) = (await served.answer(None, timing())).stages
            assert (report["model"], report["option"]) == ("quick", "o0")
            assert report["latency_ms"] >= report["service_ms"] - 1.0
        served.close()

    asyncio.run(ask())
    assert len(quick.asked) == 20 and slow.asked
    for asked in slow.asked:  # half of the time, so that the planned option has the other half
        assert asked.latency_slo_ms is None
        assert asked.time_remaining_ms == pytest.approx(HOUR_MS, abs=CLOSE_MS)
    figures = {each.option: (each.chosen, each.explored) for each in planner.report()}
    assert figures == {"o0": (20, 0), "o1": (0, len(slow.asked))}


def test_a_query_that_explores_an_option_whose_service_hangs_is_answered_as_planned() -> None:
    """The client waits for longer than the time that it gives a service: nothing was left to fall back."""
    found = pipeline({"a": stage(option(0.9, 1.0), option(0.7, 4.0))})
    quick, hangs = Model("quick"), Model("hangs")
    hangs.holds.clear()
    planner = LivePlanner(found, "static", settings=LiveSettings(explore_every=4))
    served = serve(found, quick, hangs, planner=planner)

    async def ask() -> None:
        while not hangs.asked:
            asked = Timing(time.monotonic(), None, 400.0, 2, "")
            (report,) = (await served.answer(None, asked)).stages
            assert report["model"] == "quick"
        served.close()

    asyncio.run(asyncio.wait_for(ask(), LONG_S))


def test_an_explored_option_is_not_refused_for_the_slo() -> None:
    """It was, by what its service knew from long ago: so nothing new was ever learned of it."""
    found = pipeline({"a": stage(option(0.9, 1.0), option(0.7, 4.0))})

    def strict(asked: Asked) -> GatiError | None:
        has_slo = asked.latency_slo_ms is not None
        return OverloadError("expected to take long", retry_after_s=1.0) if has_slo else None

    planner = LivePlanner(found, "static", settings=LiveSettings(explore_every=4))
    served = serve(found, Model("quick"), Model("slow", strict), planner=planner)

    async def ask() -> list[str]:
        return [(await served.answer(None, timing())).stages[0]["model"] for _ in range(20)]

    assert asyncio.run(ask()).count("slow") == 4


def test_queries_that_are_refused_at_the_entrance_bring_replicas() -> None:
    """The models of a pipeline were not told, so that their number did not grow under overload."""
    first, second = Model("a"), Model("b")
    scheduler = Scheduler(ServeConfig(), {}, {"p": serve(chain(), first, second)})
    entrance = scheduler.entrance("pipelines/p")
    with entrance.asking(Demand(10.0)):
        scheduler.check_room("pipelines/p", time.monotonic())
        entrance.at_work = 8
        with pytest.raises(CrowdedError):
            scheduler.check_room("pipelines/p", time.monotonic() - 1.0)
    assert first.refusals == [None] and second.refusals == []
    assert scheduler._first_asked("pipelines/other") == ()


def picture() -> bytes:
    """A file that only a thread decodes, however small it is."""
    file = io.BytesIO()
    Image.new("L", (6, 6)).save(file, "BMP")
    return file.getvalue()


@asynccontextmanager
async def without_a_free_thread(app: FastAPI) -> AsyncIterator[None]:
    """Meanwhile the app's scheduler decodes nothing."""
    pool, go = app.state.scheduler.pool, threading.Event()
    busy = [asyncio.create_task(pool.run(go.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    try:
        yield
    finally:
        go.set()
        await asyncio.wait(busy)


def app_of(first: Model) -> FastAPI:
    """An app with a pipeline `p` whose first stage `first` answers."""
    app = FastAPI()
    app.include_router(router)
    app.state.scheduler = Scheduler(ServeConfig(), {}, {"p": serve(chain(), first, Model("b"))})
    return app


@pytest.mark.parametrize(
    ("limit", "error", "said"),
    [
        ("timeout_ms", DeadlineError, "the deadline passed before the image was decoded"),
        ("latency_slo_ms", OverloadError, "the SLO passed before the image was decoded"),
    ],
)
def test_an_image_waits_for_a_thread_no_longer_than_its_query_has(
    limit: str, error: type[GatiError], said: str
) -> None:
    """Under overload, queries were answered long after their clients had given up."""

    async def ask() -> None:
        first = Model("a")
        app = app_of(first)
        async with without_a_free_thread(app):
            with pytest.raises(error, match=said):
                await asyncio.wait_for(answer(sent(app, f"{limit}=20"), "p"), LONG_S)
        assert not first.asked

    asyncio.run(ask())


def test_an_image_whose_client_has_gone_is_not_decoded() -> None:
    async def ask() -> None:
        first, connection = Model("a"), Connection()
        app = app_of(first)
        async with without_a_free_thread(app):
            asking = asyncio.create_task(answer(sent(app, "", connection), "p"))
            await in_the_end(lambda: connection.tell is not None)
            connection.tell()  # type: ignore[misc]
            with pytest.raises(CancelledError):
                await asyncio.wait_for(asking, LONG_S)
        assert not first.asked

    asyncio.run(ask())


class Connection:
    """A client that goes when the test says so."""

    def __init__(self) -> None:
        self.tell: Callable[[], None] | None = None

    def tell_when_gone(self, tell: Callable[[], None]) -> Callable[[], None]:
        self.tell = tell
        return lambda: None


def sent(app: FastAPI, query: str, connection: Connection | None = None) -> Request:
    """A query with an image as its body."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": picture()}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/pipelines/p/query",
        "query_string": query.encode(),
        "headers": [],
        "app": app,
        "gati.connection": connection or Connection(),
    }
    return Request(scope, receive)
