"""The scheduler's view of a model, in front of a fake service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gati.errors import ConfigError, GatiError, UnavailableError
from services.config import ServeConfig
from services.scheduler import replicas
from services.scheduler.app import create_app
from services.scheduler.dashboard import Dashboard
from services.scheduler.front import Front
from services.scheduler.models import Asked, Model
from services.scheduler.replicas import Link
from services.scheduler.scheduler import Scheduler
from services.states import STUCK
from services.wire.client import WireClient
from services.wire.gen.ttypes import MemoryInfo, ProofProgress, Tensor, VersionInfo
from services.wire.handshake import client_tls, server_tls
from services.wire.server import WireServer
from tests.services.certificates import certify
from tests.services.engines import SERVICE, Engine, reply_of, served
from tests.waiting import LONG_S, in_the_end

ASKED = Asked(1e3 * LONG_S, None, 2, "0" * 32)
TENSOR = Tensor("FP32", [1], b"\0" * 4)


class Process:
    """Stands for a supervised process: starts and stops when it is told, and can be slow at it."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.running, self.served = False, False
        self.starts = self.kills = 0
        self.hopeless: str | None = None
        self.cause, self.restarts = "it was unloaded", 0
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    def start(self) -> None:
        assert not self.running, "there are two of them"
        self.running = True
        self.starts += 1

    async def address(self) -> str:
        if self.hopeless is not None:
            raise ConfigError(self.hopeless)
        return self._where

    async def stop(self, timeout_s: float) -> None:
        await self.may_stop.wait()
        self.running = False

    def kill(self, why: str) -> None:
        self.kills += 1

    def retire(self) -> None:
        raise AssertionError("nobody drains")


Test = Callable[[Engine, Model, Process], Awaitable[None]]


def run(test: Test, **options: Any) -> None:
    async def main() -> None:
        engine = Engine()
        server = WireServer(SERVICE, engine.handlers())
        port = await server.start("127.0.0.1", 0)
        process: Any = Process(f"127.0.0.1:{port}")
        model = Model("m", host=lambda number: process, link=Link(**options))
        try:
            await test(engine, model, process)
        finally:
            for event in (engine.answers, engine.healthy, process.may_stop):
                event.set()
            await model.stop(LONG_S)
            await server.drain(0.0)

    asyncio.run(main())


async def ready(model: Model) -> None:
    await model.start()
    await model.wait_until_ready(LONG_S)


def test_unloading_answers_what_is_under_way_and_refuses_what_is_new() -> None:
    """It closed the connection first, and who had asked hung to the deadline."""

    async def test(engine: Engine, model: Model, process: Process) -> None:
        await ready(model)
        engine.answers.clear()
        asking = asyncio.create_task(model.infer(TENSOR, ASKED))
        await in_the_end(lambda: engine.begun == 1)
        stopping = asyncio.create_task(model.stop(LONG_S))
        await in_the_end(lambda: not model.ready)
        with pytest.raises(UnavailableError, match="it was unloaded"):
            await model.infer(TENSOR, ASKED)
        assert not stopping.done() and model.state == "unloaded"
        engine.answers.set()
        assert (await asking).version == "first"
        await stopping

    run(test)


def test_closing_a_connection_ends_every_call_on_it() -> None:
    async def test(engine: Engine, model: Model, process: Process) -> None:
        host, _, port = (await process.address()).rpartition(":")
        client = WireClient(SERVICE, host, int(port))
        await client.connect()
        engine.healthy.clear()
        asking = asyncio.create_task(client.call("health", timeout_s=LONG_S))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(UnavailableError):
            await asking

    run(test)


def test_loading_while_unloading_leaves_one_process() -> None:
    async def test(engine: Engine, model: Model, process: Process) -> None:
        await ready(model)
        process.may_stop.clear()
        stopping = asyncio.create_task(model.stop(LONG_S))
        await in_the_end(lambda: not model.ready)
        starting = [asyncio.create_task(ready(model)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert process.starts == 1
        stopping.cancel()  # whoever asked for it has gone; it goes on
        process.may_stop.set()
        await asyncio.gather(*starting)
        assert process.starts == 2 and process.running
        assert (await model.infer(TENSOR, ASKED)).version == "first"

    run(test)


def test_unloading_while_loading_ends_the_wait() -> None:
    async def test(engine: Engine, model: Model, process: Process) -> None:
        engine.state = "loading"
        await model.start()
        waiting = asyncio.create_task(model.wait_until_ready(LONG_S))
        await in_the_end(lambda: model.state == "loading")
        await model.stop(LONG_S)
        with pytest.raises(UnavailableError, match="it was unloaded"):
            await waiting

    run(test)


def test_no_model_is_started_while_the_server_ends() -> None:
    """A process began, was killed a moment later, and the client had no reply."""

    async def main(address: str) -> None:
        model = Model("m", address=address)
        scheduler = Scheduler(ServeConfig(), {"m": model}, {})
        await scheduler.start()
        await model.stop(LONG_S)
        reading, rest = asyncio.Event(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            reading.set()
            yield b"{"
            await rest.wait()
            yield b"}"

        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asking = client.post("/v2/repository/models/m/load", content=body(), headers=headers)
            early = asyncio.create_task(asking)
            await reading.wait()
            await scheduler.drain()
            rest.set()
            for reply in (await early, await client.post("/v2/repository/models/m/load", json={})):
                assert reply.status_code == 503 and "shutting down" in reply.json()["error"]
        assert not model.wanted

    with served() as address:
        asyncio.run(main(address))


def test_a_service_is_asked_once_for_all_who_want_the_metrics_at_once() -> None:
    """Whoever had no key could keep the server and its services busy with them."""

    class Counting(Engine):
        asked = 0

        async def statistics(self) -> Any:
            self.asked += 1
            return await super().statistics()

    async def main() -> None:
        engine = Counting()
        server = WireServer(SERVICE, engine.handlers())
        model = Model("m", address=f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
        scheduler = Scheduler(ServeConfig(api_key="a key"), {"m": model}, {})
        await model.start()
        await model.wait_until_ready(LONG_S)
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for times in (1, 2):
                engine.healthy.clear()
                asking = [asyncio.create_task(client.get("/metrics")) for _ in range(10)]
                await in_the_end(lambda times=times: engine.asked >= times)  # type: ignore[misc]
                engine.healthy.set()
                assert {(await each).status_code for each in asking} == {200}
                assert engine.asked == times
        await model.stop(LONG_S)
        await server.drain(0.0)

    asyncio.run(main())


def test_what_a_restart_cannot_mend_ends_the_wait() -> None:
    async def test(engine: Engine, model: Model, process: Process) -> None:
        process.hopeless = "no composition 'x'"
        await model.start()
        with pytest.raises(ConfigError, match="model 'm' cannot be served: no composition 'x'"):
            await model.wait_until_ready(LONG_S)

    run(test)


def test_a_service_that_does_not_say_how_it_is_is_not_ready_and_is_ended() -> None:
    async def test(engine: Engine, model: Model, process: Process) -> None:
        await ready(model)
        engine.healthy.clear()
        await in_the_end(lambda: not model.ready)
        with pytest.raises(UnavailableError, match="does not answer"):
            await model.infer(TENSOR, ASKED)
        await in_the_end(lambda: process.kills >= 1)
        engine.healthy.set()  # the next process
        await in_the_end(lambda: model.ready)

    run(test, hang_timeout_s=0.2)


def test_an_engine_that_is_stuck_is_ended() -> None:
    async def test(engine: Engine, model: Model, process: Process) -> None:
        await ready(model)
        engine.state = STUCK
        await in_the_end(lambda: process.kills >= 1)
        await in_the_end(lambda: not model.ready)  # on a busy machine it may be connected again by now
        engine.state = "serving"
        await in_the_end(lambda: model.ready)

    run(test, hang_timeout_s=0.2)


def test_figures_of_a_service_that_hangs_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page with the figures of all models took ten seconds."""
    monkeypatch.setattr(replicas, "_STATISTICS_TIMEOUT_S", 0.01)
    monkeypatch.setattr(replicas, "CONTROL_TIMEOUT_S", 10 * LONG_S)

    async def test(engine: Engine, model: Model, process: Process) -> None:
        await ready(model)
        engine.healthy.clear()
        async with asyncio.timeout(LONG_S):
            with pytest.raises(GatiError):
                await model.statistics_by_replica()

    run(test, hang_timeout_s=10 * LONG_S)


@pytest.mark.parametrize("error", [ValueError("label too long"), OverflowError("port"), OSError(5, "input")])
def test_no_exception_ends_the_connecting(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host name that is none, or port 99999, ended it without a word."""
    original, failures = asyncio.open_connection, [error, error]

    async def failing(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return await original(*arguments, **named)

    monkeypatch.setattr(asyncio, "open_connection", failing)

    async def test(engine: Engine, model: Model, process: Process) -> None:
        await ready(model)
        assert not failures

    run(test)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", f"{'a' * 70}.example:80", "x", "unix:/nowhere"])
def test_addresses_that_are_none_are_told(address: str) -> None:
    async def main() -> None:
        model = Model("m", address=address)
        await model.start()
        await in_the_end(lambda: model.cause == f"nothing answers at {address}")
        with pytest.raises(UnavailableError, match="model 'm' does not answer: nothing answers"):
            await model.infer(TENSOR, ASKED)
        await model.stop(LONG_S)

    asyncio.run(main())


def test_why_a_service_elsewhere_is_not_connected_is_told(tmp_path: Path) -> None:
    """Whatever was wrong with its certificate, or with the secret, nothing answered there."""

    async def main() -> None:
        (tmp_path / "other").mkdir()
        (certificate, key), (other, _) = certify(tmp_path), certify(tmp_path / "other")
        server = WireServer(SERVICE, {}, secret=b"x" * 16, tls=server_tls(certificate, key))
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        for told, link in (
            (f"TLS with {address} failed", Link(secret=b"x" * 16, tls=client_tls(other))),
            (f"{address} does not accept our secret", Link(secret=b"y" * 16, tls=client_tls(certificate))),
        ):
            model = Model("m", address=address, link=link)
            await model.start()
            while not model.cause.startswith(told):
                await asyncio.sleep(0.01)
            await model.stop(LONG_S)
        await server.drain(0.0)

    asyncio.run(asyncio.wait_for(main(), LONG_S))


def test_versions_that_were_loaded_come_back_with_the_process() -> None:
    """They were there until the process died, and nobody was told."""

    async def test(engine: Engine, model: Model, process: Process) -> None:
        await ready(model)
        for version, composition in (("a", "fast"), ("b", None), ("c", "gone")):
            await model.load(version, composition)
        await model.load("a", "fast")
        await model.unload("b")
        assert engine.calls == ["load a fast", "load b None", "load c gone", "load a fast"]
        engine.calls.clear()
        engine.versions = ["first"]  # another process
        engine.refused = "c"
        client = model.replicas[0]._client
        assert client is not None
        await client.close()  # the one before has died
        await in_the_end(lambda: model.ready)
        assert model.active.version == "a" and engine.calls == ["load a fast", "load c gone"]
        engine.calls.clear()
        await model.stop(LONG_S)
        engine.versions = ["first"]
        await ready(model)
        assert engine.calls == ["load a fast"]

    run(test, hang_timeout_s=10 * LONG_S)  # else versions are loaded again whenever this process is late


def test_a_version_that_the_repository_brings_is_noticed() -> None:
    """Metadata and metrics had the version that answered when the service was connected to."""

    async def test(engine: Engine, model: Model, process: Process) -> None:
        await ready(model)
        looking = asyncio.create_task(Dashboard(model).keep_looking())
        engine.versions, engine.active = ["first", "7"], "7"
        await in_the_end(lambda: model.active.version == "7")
        engine.versions = ["first"]
        await in_the_end(lambda: [each.version for each in model.info.versions] == ["first"])
        looking.cancel()

    run(test)


def test_the_page_shows_every_audit_since_the_last_look_and_none_from_before_the_first() -> None:
    dashboard = Dashboard(Model("m", address="127.0.0.1:1"))
    for audits, losses, shown in (
        (5_000, 20, []),
        (5_003, 20, [True] * 3),
        (5_005, 21, [True] * 4 + [False]),
        (5_005, 21, [True] * 4 + [False]),
        (40, 1, [True] * 4 + [False]),  # another process counts anew
        (41, 1, [True] * 4 + [False, True]),
    ):
        dashboard._audited(audits, losses)
        known = dashboard.state.since()["audits"]
        assert (known["n"], known["losses"], known["outcomes"]) == (audits, losses, shown)


@pytest.mark.parametrize(
    ("state", "proof", "shown"),
    [
        ("probation", ProofProgress(10, 0, 150), {"version": "3", "audits": 10, "waits": False}),
        ("stopped", ProofProgress(10, 1, 190), {"version": "3", "audits": 10, "waits": False}),
        ("serving", ProofProgress(10, 0, 150), None),  # of a looser setting: its caches answer
        ("serving", None, None),
    ],
)
def test_the_page_calls_no_caches_that_answer_on_probation(
    state: str, proof: Any, shown: dict[str, Any] | None
) -> None:
    dashboard = Dashboard(Model("m", address="127.0.0.1:1"))
    dashboard._on_trial(VersionInfo("3", True, "torch", state=state, proof=proof))
    told = dashboard.state.since()["proof"]
    assert (told and {name: told[name] for name in ("version", "audits", "waits")}) == shown


def test_the_page_tells_a_version_on_trial_from_a_new_one() -> None:
    model = Model("m", address="127.0.0.1:1")
    serving = VersionInfo("1", True, "torch", state="serving")
    trial = VersionInfo("3", False, "torch", state="probation", pending=True, proof=ProofProgress(10, 0, 150))
    model.info = SimpleNamespace(versions=[serving, trial])
    dashboard = Dashboard(model)
    dashboard._on_trial(serving)
    told = dashboard.state.since()
    assert (told["proof"]["version"], told["proof"]["waits"]) == ("3", True)
    assert "trial" in told["events"][0] and len(told["events"]) == 1


@pytest.mark.parametrize(("level", "promised"), [(1, 0.97), (0, None)])
def test_the_page_shows_the_promise_of_memory_while_caches_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, level: int, promised: float | None
) -> None:
    async def test(engine: Engine, model: Model, process: Process) -> None:
        await ready(model)
        found = await model.statistics()
        found.memory = MemoryInfo(1, 0, 5, 3, level, 0.97)

        async def statistics() -> Any:
            return found

        monkeypatch.setattr(model, "statistics", statistics)
        dashboard = Dashboard(model)
        await dashboard._look()
        assert dashboard.state.since()["promise"] == promised

    run(test)


def test_the_page_says_that_lookups_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that the caches answer where they may."""

    async def test(engine: Engine, model: Model, process: Process) -> None:
        await ready(model)
        found, dashboard = await model.statistics(), Dashboard(model)

        async def statistics() -> Any:
            return found

        monkeypatch.setattr(model, "statistics", statistics)
        for resting in (True, None):
            model.active.resting = resting
            await dashboard._look()
            assert dashboard.state.since()["resting"] is bool(resting)

    run(test)


class Certified(Engine):
    """Its version is described with certificate "a"; answers name another one, `names`."""

    def __init__(self, names: str | None) -> None:
        super().__init__()
        self._names = names

    async def start(self) -> None: ...

    async def drain(self) -> None: ...

    async def infer(self, request: Any) -> Any:
        response = await super().infer(request)
        response.certificate_id = self._names
        return response

    async def describe(self) -> Any:
        info = await super().describe()
        (version,) = info.versions
        version.certificate_json, version.certificate_id = '{"sentence": "what a proves"}', "a"
        return info


@pytest.mark.parametrize(("names", "shown"), [("a", "what a proves"), ("b", None), (None, None)])
def test_a_certificate_is_shown_only_with_answers_that_rest_on_it(
    names: str | None, shown: str | None
) -> None:
    """Another composition may have been loaded under the same name since the versions were described."""
    asked = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 1], "data": [0.0]}]}
    with served(Certified(names)) as address:
        reply = reply_of("m", address, "POST", "/v2/models/m/infer", json=asked)
    assert reply.status_code == 200, reply.text
    assert reply.json()["parameters"].get("certificate") == shown
