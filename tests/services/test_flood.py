"""A flood of requests for one model: early refusals, and the effect on other models."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from gati.errors import OverloadError
from services.config import ServeConfig
from services.scheduler.app import create_app
from services.scheduler.entrance import CrowdedError, Demand, Entrance
from services.scheduler.front import Front
from services.scheduler.lag import Shares
from services.scheduler.models import Asked, Model
from services.scheduler.scheduler import Scheduler
from services.wire.gen.ttypes import Answer, InferResponse
from tests.waiting import LONG_S, Clock, in_the_end

PLACES = 20
REJECTED = "gati_rejected_total"


class Slow(Model):
    """Its service answers when it is let go, and refuses what it has no place for."""

    def __init__(self, name: str) -> None:
        super().__init__(name, address="127.0.0.1:1")
        self.go = asyncio.Event()
        self.at_work = self.asked = 0
        self.slos_ms: list[float | None] = []
        self.info = SimpleNamespace(inputs=None, largest_batch=64, class_names=None)

    async def infer(self, tensor: Any, asked: Asked, version: str | None = None) -> Any:
        self.asked += 1
        self.slos_ms.append(asked.latency_slo_ms)
        if self.at_work >= PLACES:
            await asyncio.sleep(0)  # the way there and back
            raise OverloadError("the queue is full", retry_after_s=0.25)
        self.at_work += 1
        try:
            await self.go.wait()
        finally:
            self.at_work -= 1
        return InferResponse([Answer(0, np.ones(1, "<f4").tobytes(), "base")], "v", 0.0, 1.0)


class Server:
    """A scheduler with two models, and clients of it."""

    def __init__(self) -> None:
        self.models = {name: Slow(name) for name in ("flooded", "spared")}
        self.scheduler = Scheduler(ServeConfig(), dict(self.models), {})
        transport = httpx.ASGITransport(Front(create_app(self.scheduler)))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        self.read = 0  # bodies

    async def get(self, path: str) -> httpx.Response:
        return await self._client.get(path)

    async def ask(self, name: str, slo_ms: float | None = None) -> httpx.Response:
        parameters = {} if slo_ms is None else {"latency_slo_ms": slo_ms}
        tensor = {"name": "input", "shape": [1], "datatype": "FP32", "data": [1.0]}
        request = httpx.Request("POST", "http://x", json={"inputs": [tensor], "parameters": parameters})

        async def body() -> AsyncIterator[bytes]:
            self.read += 1
            yield request.content

        return await self._client.post(f"/v2/models/{name}/infer", content=body())

    async def flood(self, count: int, slo_ms: float | None = None) -> Counter[int]:
        """The statuses of the refused ones of so many requests, each sent when the one before has settled."""
        found: Counter[int] = Counter()
        model = self.models["flooded"]
        for _ in range(count):
            asking, now = asyncio.create_task(self.ask("flooded", slo_ms)), model.at_work
            while not asking.done() and model.at_work == now:
                await asyncio.sleep(0)
            if asking.done():
                found[asking.result().status_code] += 1
        return found


def test_a_flood_is_refused_before_it_is_read_and_the_other_model_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("services.scheduler.entrance._FORGOTTEN_S", LONG_S)

    async def main() -> None:
        server = Server()
        flooded, spared = server.models["flooded"], server.models["spared"]
        assert await server.flood(300) == {429: 300 - PLACES}
        # All that did not fit were read and passed on to the service, to be refused there.
        assert flooded.asked == server.read == PLACES + 1
        refused = await server.ask("flooded")
        assert refused.status_code == 429 and refused.headers["Retry-After-Ms"] == "250"
        assert f"{PLACES} requests are in progress" in refused.json()["error"]
        page = (await server.get("/metrics")).text
        assert (
            f'{REJECTED}{{model="flooded",pipeline="",reason="resource_exhausted"}} {300 - PLACES + 1}.0'
            in page
        )
        lines = [each for each in caplog.records if each.msg in ("http", "refused before reading")]
        assert len(lines) < 100  # thousands a second would cost more than to refuse them
        spared.go.set()
        # An SLO of seconds: this process may have to wait for its turn.
        assert [(await server.ask("spared", 5e4)).status_code for _ in range(20)] == [200] * 20
        flooded.go.set()
        await in_the_end(lambda: flooded.at_work == 0)
        assert (await server.ask("flooded")).status_code == 200  # there is time for it again

    asyncio.run(main())


def test_what_a_flood_takes_outside_services_is_not_taken_off_another_models_slo() -> None:
    """There was one estimate for all: while it was above the SLO, all of the other model was refused."""

    async def main() -> None:
        server = Server()
        spared, flooded = server.models["spared"], server.models["flooded"]
        scheduler = server.scheduler
        shares = scheduler._shares = Shares(lambda: 0.0)  # real time would halve what was asked before
        for _ in range(100):
            for model in server.models:  # the event loop is the same
                scheduler.answered(f"models/{model}", 1e6, 1.0)
            shares.add("models/flooded")
        asking = [asyncio.create_task(server.ask("spared", 5e4)) for _ in range(3)]
        await in_the_end(lambda: spared.at_work == 3)
        assert all(each is not None and each < 5e4 for each in spared.slos_ms)
        spared.go.set()
        assert [(await each).status_code for each in asking] == [200] * 3
        alone = asyncio.create_task(server.ask("flooded", 3e5))
        await in_the_end(lambda: flooded.at_work == 1)  # whatever was learned under load
        crowded = [await server.ask("flooded", 3e5) for _ in range(3)]
        assert [each.status_code for each in crowded] == [429] * 3  # what it takes itself is
        flooded.go.set()
        await alone

    asyncio.run(main())


def test_the_time_to_receive_a_body_is_not_expected_of_other_requests() -> None:
    """A few clients with slow connections had most requests with an SLO refused."""

    async def main() -> None:
        server = Server()
        model, scheduler = server.models["spared"], server.scheduler
        arrival_s = scheduler.arrival_s
        scheduler.arrival_s = lambda request: arrival_s(request) - 500.0  # type: ignore[method-assign]
        model.go.set()
        for _ in range(20):
            assert (await server.ask("spared", 5.9e5)).status_code == 200
        scheduler.arrival_s = arrival_s  # type: ignore[method-assign]
        model.go.clear()
        asking = [asyncio.create_task(server.ask("spared", 3e5)) for _ in range(3)]
        await in_the_end(lambda: model.at_work + sum(each.done() for each in asking) == 3)
        model.go.set()
        assert [(await each).status_code for each in asking] == [200] * 3

    asyncio.run(main())


def entrance() -> tuple[Entrance, Clock]:
    clock = Clock(100.0)
    return Entrance(clock), clock


def crowd(at: Entrance, count: int, demand: Demand) -> list[Any]:
    """So many requests that are at work."""
    asking = [at.asking(demand) for _ in range(count)]
    for each in asking:
        each.__enter__()
    return asking


def refuse(at: Entrance, demand: Demand) -> None:
    """A service refuses a request."""
    with pytest.raises(OverloadError, match="full"), at.asking(demand):
        raise OverloadError("full", retry_after_s=0.5)


def answer(at: Entrance, demand: Demand) -> None:
    """A service answers a request."""
    with at.asking(demand):
        pass


def lets_in(at: Entrance) -> bool:
    try:
        at.check()
    except OverloadError as error:
        assert error.retry_after_s == 0.5
        return False
    return True


ANY = Demand(50.0)


def test_as_many_are_let_in_as_were_at_work_when_one_was_refused() -> None:
    at, clock = entrance()
    asking = crowd(at, 30, ANY)
    assert lets_in(at)
    refuse(at, ANY)
    assert not lets_in(at)
    asking.pop().__exit__(None, None, None)  # answered
    assert lets_in(at)
    asking += crowd(at, 1, ANY)
    assert not lets_in(at)  # one in thirty more is not one
    for _ in range(40):
        asking.pop(0).__exit__(None, None, None)
        asking += crowd(at, 1, ANY)
    assert lets_in(at)  # now it is: the service may have become faster
    refuse(at, ANY)
    assert not lets_in(at)
    clock.now_s += 1.1
    assert lets_in(at)


def test_a_few_are_always_read() -> None:
    at, _ = entrance()
    refuse(at, ANY)
    asking = crowd(at, 7, ANY)
    assert lets_in(at)
    asking += crowd(at, 1, ANY)
    assert not lets_in(at)


@pytest.mark.parametrize("easier", [Demand(60.0, 2, 2), Demand(50.0, 1, 2), Demand(50.0, 2, 1)])
def test_the_refusal_of_one_that_asked_for_more_says_nothing_of_the_others(easier: Demand) -> None:
    at, clock = entrance()
    hard = Demand(50.0, 2, 2)
    with at.asking(easier):
        pass
    asking = crowd(at, 20, hard)
    for _ in range(3):
        refuse(at, hard)
        assert lets_in(at)
        clock.now_s += 14.0
    clock.now_s += 30.0  # nobody asks for less any more
    refuse(at, hard)
    assert not lets_in(at) and len(asking) == 20


def test_where_a_longer_slo_may_lead_to_a_slower_model_its_refusal_says_nothing_of_the_others() -> None:
    """A pipeline refused hurried queries, for which its small network had time, if its large one was busy."""
    clock = Clock(100.0)
    at = Entrance(clock, plans=True)
    answer(at, Demand(20.0))
    crowd(at, 20, Demand(20.0))
    refuse(at, Demand(200.0))  # by the large one
    assert lets_in(at)
    clock.now_s += 100.0
    refuse(at, Demand(200.0))  # no hurried one has come for long
    assert not lets_in(at)


def test_where_hurried_queries_are_refused_too_longer_ones_tell_how_many_are_too_many() -> None:
    """Under a flood of both, no bound was ever set: the easiest ones were never believed."""
    clock = Clock(100.0)
    at = Entrance(clock, plans=True)
    answer(at, Demand(50.0))
    crowd(at, 20, Demand(50.0))
    refuse(at, Demand(20.0))  # which was never met
    refuse(at, Demand(200.0))
    assert lets_in(at)
    refuse(at, Demand(50.0))
    refuse(at, Demand(200.0))
    assert not lets_in(at)
    clock.now_s += 2.0
    refuse(at, Demand(200.0))
    assert lets_in(at), "the hurried ones are not refused any more"


def test_an_slo_that_was_not_met_is_not_remembered() -> None:
    """A late answer counted as one in time."""
    at, clock = entrance()
    for slo_ms, took_s in ((0.1, 0.05), (200.0, 0.15)):
        with at.asking(Demand(slo_ms)):
            clock.now_s += took_s
    assert at.least_slo_ms == 200.0


def test_who_has_waited_longer_than_any_slo_is_not_read() -> None:
    at, clock = entrance()
    at.check(1e6)  # nothing is known
    for slo_ms in (50.0, 80.0):
        with at.asking(Demand(slo_ms)):
            pass
    at.check(80.0)  # few are at work
    at.at_work = 8
    at.check(79.0)
    with pytest.raises(CrowdedError, match="waited 80 ms before it was read"):
        at.check(80.0)
    with at.asking(Demand(float("inf"))):
        at.check(1e6)
    clock.now_s += 100.0
    with at.asking(Demand(50.0)), pytest.raises(CrowdedError):
        at.check(50.0)


def test_the_smallest_slo_that_was_met_of_late_is_remembered_for_a_while() -> None:
    """One that no service can meet, perhaps given in seconds, had other models' requests refused for lag."""
    at, clock = entrance()
    assert at.least_slo_ms == float("inf")
    for slo_ms in (80.0, 20.0, 50.0):
        answer(at, Demand(slo_ms))
    refuse(at, Demand(0.1))
    assert at.least_slo_ms == 20.0
    clock.now_s += 31.0
    assert at.least_slo_ms == 20.0
    answer(at, Demand(50.0))
    clock.now_s += 31.0
    assert at.least_slo_ms == 50.0
    clock.now_s += 62.0
    assert at.least_slo_ms == float("inf")
