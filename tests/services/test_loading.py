"""A model that is loaded over REST after it could not be served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from gati.errors import ConfigError
from services.config import ServeConfig
from services.scheduler.app import create_app
from services.scheduler.front import Front
from services.scheduler.models import Model
from services.scheduler.scheduler import Scheduler
from services.wire.server import WireServer
from tests.services.engines import SERVICE, Engine
from tests.waiting import LONG_S, in_the_end


class Process:
    """Stands for a supervised process, which is hopeless the first `attempts` times that it is started."""

    cause, restarts, served, running = "it was unloaded", 0, False, False

    def __init__(self, where: str, attempts: int) -> None:
        self.starts = 0
        self.hopeless: str | None = None
        self._where, self._attempts = where, attempts

    def start(self) -> None:
        self.starts += 1
        self.hopeless = "the library is damaged" if self.starts <= self._attempts else None

    async def address(self) -> str:
        if self.hopeless is not None:
            raise ConfigError(self.hopeless)
        return self._where

    async def stop(self, timeout_s: float) -> None: ...

    def kill(self, why: str) -> None:
        raise AssertionError("no one hangs")

    def retire(self) -> None: ...


Load = Callable[[], Awaitable[httpx.Response]]


def run(test: Callable[[Model, list[Process], Engine, Load], Awaitable[None]], *attempts: int) -> None:
    async def main() -> None:
        engine = Engine()
        server = WireServer(SERVICE, engine.handlers())
        where = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        processes = [Process(where, each) for each in attempts]
        model = Model("m", host=processes.__getitem__, replicas=len(processes))
        scheduler = Scheduler(ServeConfig(), {"m": model}, {})
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await test(model, processes, engine, lambda: client.post("/v2/repository/models/m/load", json={}))
        await model.stop(LONG_S)
        await server.drain(0.0)

    asyncio.run(main())


def test_a_model_that_became_hopeless_after_its_load_was_answered_is_started_again() -> None:
    """Only a restart of the server helped: to load it again started nothing."""

    async def test(model: Model, processes: list[Process], engine: Engine, load: Load) -> None:
        await model.start()
        await in_the_end(lambda: model.hopeless is not None)
        assert (await load()).status_code == 200
        assert model.ready and processes[0].starts == 2

    run(test, 1)


def test_one_replica_that_is_hopeless_stops_no_other() -> None:
    """One node without the library was enough to unload the model everywhere."""

    async def test(model: Model, processes: list[Process], engine: Engine, load: Load) -> None:
        engine.healthy.clear()
        refused = await load()
        assert refused.status_code == 400 and "the library is damaged" in refused.json()["error"]
        again = asyncio.create_task(load())
        engine.healthy.set()
        await in_the_end(lambda: model.ready)
        await again
        assert [process.starts for process in processes] == [1, 1]

    run(test, 9, 0)


def test_replicas_that_become_hopeless_after_a_load_was_answered_are_stopped() -> None:
    """The load stopped nothing, as the second one might still serve; so no server was ready any more."""

    async def test(model: Model, processes: list[Process], engine: Engine, load: Load) -> None:
        engine.healthy.clear()
        assert (await load()).status_code == 400 and model.wanted
        processes[1].hopeless = "the library is damaged"
        await in_the_end(lambda: not model.wanted)
        engine.healthy.set()
        assert (await load()).status_code == 200
        assert model.ready and [process.starts for process in processes] == [2, 2]

    run(test, 1, 0)
