"""Responses of the front end with unavailable models; starts no process."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from gati.errors import CancelledError, OverloadError, RequestError, UnavailableError
from services.config import ServeConfig
from services.pool import BoundedPool
from services.scheduler.app import create_app
from services.scheduler.bodies import unless_gone
from services.scheduler.entrance import Demand
from services.scheduler.front import Front, _FastRequest
from services.scheduler.lag import LagMeter, Shares
from services.scheduler.models import Model
from services.scheduler.parameters import priority
from services.scheduler.protocol import parse_request
from services.scheduler.reading import read_inference
from services.scheduler.reasons import without_folders
from services.scheduler.replicas import Asked
from services.scheduler.scheduler import Scheduler
from services.web import web_server
from services.wire.gen.ttypes import Answer, InferResponse
from tests.services.engines import reply_of, served
from tests.waiting import LONG_S, Clock, in_the_end

CAUSE = "its process ended with status 1; it last said: no file '/root/secret plans/model.py' / password"
WAS_READY = SimpleNamespace(inputs=None, largest_batch=1, versions=[])  # what a model said of itself


class Dead:
    """A process that has died with last words."""

    running, served, restarts, hopeless, cause = False, False, 1, None, CAUSE

    def start(self) -> None:
        self.running = False

    async def address(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("never")

    def retire(self) -> None:
        self.running = False

    async def stop(self, timeout_s: float) -> None:
        self.running = False


def run(test: Callable[[httpx.AsyncClient], Awaitable[None]], info: Any = None, **config: Any) -> None:
    async def main() -> None:
        dead: Any = Dead()
        model = Model("m", host=lambda number: dead)
        model.info = info
        await model.start()
        scheduler = Scheduler(ServeConfig(**config), {"m": model}, {})
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await test(client)
        await model.stop(0.0)

    asyncio.run(main())


@pytest.mark.parametrize("keys", [{}, {"api_key": "one"}])
def test_readiness_tells_nobody_what_a_process_said(keys: dict[str, str]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.get("/v2/health/ready")
        assert reply.status_code == 503
        assert reply.json() == {"ready": False, "waiting_for": {"m": "starting"}}
        for path in ("/v2/health/live", "/metrics"):
            assert "password" not in (await client.get(path)).text

    run(test, **keys)


def test_with_a_key_the_cause_is_told_without_folders() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        client.headers["X-API-Key"] = "one"
        told = [
            (await client.get("/v2/models/m/ready")).json()["error"],
            (await client.post("/v2/repository/index")).json()[0]["reason"],
            (await client.post("/v2/models/m/infer", json=BODY)).json()["error"],
            (await client.get("/v1/adaptation")).json()["models"][0]["error"],
        ]
        for each in told:
            assert "status 1" in each and "model.py" in each and "secret" not in each and "/root" not in each

    run(test, api_key="one")


def test_of_what_a_process_said_last_every_line_is_told() -> None:
    """The middle one of three was taken for a folder."""
    said = "it last said: the device is lost / out of memory / in /root/a secret/model.py, line 3"
    told = "it last said: the device is lost / out of memory / in model.py, line 3"
    assert without_folders(said) == told


BODY = {"inputs": [{"name": "input", "shape": [1], "datatype": "FP32", "data": [1]}]}


def test_who_is_not_let_in_is_told_how_to_ask() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for method, scheme in (("GET", "Basic"), ("POST", "Bearer")):
            reply = await client.request(method, "/v2/models/m/infer")
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"].startswith(f'{scheme} realm="gati"')

    run(test, api_key="one")


def test_who_is_not_let_in_is_counted() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            assert (await client.post("/v2/models/m/infer", json=BODY)).status_code == 401
        page = (await client.get("/metrics")).text
        assert 'gati_rejected_total{model="",pipeline="",reason="not_allowed"} 3.0' in page

    run(test, api_key="one")


@pytest.mark.parametrize(("name_bytes", "status"), [(100, 503), (2**18, 413)])
def test_json_beside_a_large_tensor_has_what_that_leaves(name_bytes: int, status: int) -> None:
    size = 3 * 2**20
    tensor = {"name": "input", "shape": [1, size], "datatype": "UINT8"}
    parameters = {"binary_data_size": size}
    text = json.dumps({"id": "x" * name_bytes, "inputs": [{**tensor, "parameters": parameters}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}

    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.post("/v2/models/m/infer", content=text + bytes(size), headers=headers)
        assert reply.status_code == status, reply.text

    run(test, WAS_READY, largest_json_bytes=4 * 2**20)


def test_before_a_model_is_known_no_input_is_called_invalid() -> None:
    """Inputs of a model with several were 400, for good, while it was loading."""
    tensor = {"name": "input_ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
    asked = {"inputs": [tensor, {**tensor, "name": "attention_mask"}]}

    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.post("/v2/models/m/infer", json=asked)
        assert reply.status_code == 503 and reply.headers["Retry-After"]

    run(test)


def test_before_a_model_is_known_no_version_is_called_unknown() -> None:
    """It was 404, for good, while the model was loading."""

    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.get("/v2/models/m/versions/default")
        assert reply.status_code == 503 and reply.headers["Retry-After"]

    run(test)


def test_a_model_that_is_asleep_has_only_its_versions() -> None:
    """It said of every name that this version is ready."""

    async def main() -> None:
        dead: Any = Dead()
        model = Model("m", host=lambda number: dead)
        model.info = SimpleNamespace(versions=[SimpleNamespace(version="1")])
        model.sleep.fall_asleep()
        transport = httpx.ASGITransport(Front(create_app(Scheduler(ServeConfig(), {"m": model}, {}))))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for version, status in (("1", 200), ("2", 404)):
                reply = await client.get(f"/v2/models/m/versions/{version}/ready")
                assert reply.status_code == status, reply.text

    asyncio.run(main())


def test_clients_get_no_more_time_or_haste_than_is_allowed() -> None:
    strict = Scheduler(ServeConfig(longest_timeout_ms=100.0, highest_priority=3), {}, {})
    usual = Scheduler(ServeConfig(), {}, {})
    for scheduler, expected in ((strict, (100.0, 3)), (usual, (600_000.0, 1))):
        found = scheduler.timing(0.0, None, 1e12, 1, None)
        assert (found.timeout_ms, found.priority) == expected


@pytest.mark.parametrize(
    ("own", "version"),
    [
        ({"model": "torchvision:resnet18"}, "base"),  # has no compositions
        ({"library": "l", "caches": False}, "base"),
        ({"library": "l", "composition": "fast"}, "fast"),
        ({"library": "l"}, "default"),
        ({"address": "a:1"}, "default"),  # of what is there, nothing is known
    ],
)
def test_without_parameters_what_is_configured_is_loaded(own: dict[str, Any], version: str) -> None:
    config = ServeConfig.model_validate({"models": {"m": own}})
    with served() as address:
        reply = reply_of("m", address, "POST", "/v2/repository/models/m/load", config=config, json={})
    assert (reply.status_code, reply.json()["version"]) == (200, version)


def test_what_has_not_been_missed_yet_is_counted_as_none() -> None:
    """Prometheus does not see the first increment of a counter that appears with it."""
    with served() as address:
        page = reply_of("m", address, "GET", "/metrics").text
    assert 'gati_request_slo_missed_total{model="m"} 0.0' in page
    assert 'gati_request_seconds_count{model="m"} 0.0' in page


@pytest.mark.parametrize(
    ("slo_ms", "timeout_ms"),
    [(None, 10_000.0), (50.0, 100.0), (30_000.0, 60_000.0), (500_000.0, 600_000.0)],
)
def test_without_a_timeout_a_request_may_take_twice_its_slo(slo_ms: float | None, timeout_ms: float) -> None:
    scheduler = Scheduler(ServeConfig(), {}, {})
    assert scheduler.timing(0.0, slo_ms, None, None, None).timeout_ms == timeout_ms


@pytest.mark.parametrize(
    "asked", [{}, {"priority": None}, {"priority": 0}, {"priority": "0"}, {"priority": 2}]
)
def test_the_default_priority_is_the_same_however_it_is_asked_for(asked: dict[str, Any]) -> None:
    tensor = {"name": "input", "shape": [1, 1], "datatype": "FP32", "data": [0.0]}
    found = parse_request(json.dumps({"inputs": [tensor], "parameters": asked}).encode())
    scheduler = Scheduler(ServeConfig(), {}, {})
    assert scheduler.timing(0.0, None, None, found.priority, None).priority == 2
    assert scheduler.timing(0.0, None, None, priority(asked.get("priority")), None).priority == 2


@pytest.mark.parametrize("wrong", [False, True, 0.0, 11, -1, ""])
def test_what_is_not_a_priority_is_refused(wrong: object) -> None:
    """`false` and 0.0 equal 0, and were taken for the default."""
    with pytest.raises(RequestError, match="`priority` is"):
        priority(wrong)


def test_bodies_that_never_come_keep_nobody_out() -> None:
    """They were taken for work: whenever another program held up the server, the next request was refused."""

    async def main() -> None:
        dead: Any = Dead()
        model = Model("m", host=lambda number: dead)
        model.info = WAS_READY
        scheduler = Scheduler(ServeConfig(), {"m": model}, {})
        await scheduler.start()
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        asked = 0

        async def body() -> AsyncIterator[bytes]:
            nonlocal asked
            asked += 1
            await asyncio.Event().wait()
            yield b""

        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            silent = [
                asyncio.create_task(client.post("/v2/models/m/infer", content=body())) for _ in range(10)
            ]
            await in_the_end(lambda: asked == len(silent))
            at = scheduler.entrance("models/m")
            while at.least_slo_ms > 20.0:  # an answer in time, however slow the machine is
                with at.asking(Demand(slo_ms=20.0)):
                    pass
            for _ in range(12):  # the event loop falls behind, and stays so
                time.sleep(0.02)
                await asyncio.sleep(0)
            with ExitStack() as at_work, pytest.raises(OverloadError, match="ms behind"):
                for _ in silent:
                    at_work.enter_context(scheduler.under_way())
                scheduler.check_lag("/v2/models/m/infer")
            assert (await client.post("/v2/models/m/infer", json=BODY)).status_code == 503
            for each in silent:
                each.cancel()
            await asyncio.wait(silent)
        await scheduler.drain()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"inputs":[{"name":"input","datatype":"FP32","shape":[' + b"1," * 20_000 + b"1]}]}", 400),
        (b'{"inputs":' + b"[" * 30_000 + b"]" * 30_000 + b"}", 400),
        (b"[" + b"[]," * 60_000 + b"[]]", 413),
        (b'{"inputs":[{"name":' + b"[" * 1000 + b"]" * 1000 + b"}]}", 400),
        (b'{"parameters":{"priority":"' + b"9" * 5000 + b'"},"inputs":[{}]}', 400),
    ],
)
def test_hostile_documents_are_refused_as_ours(body: bytes, status: int) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.post("/v2/models/m/infer", content=body)
        assert reply.status_code == status and len(reply.json()["error"]) < 300, reply.text[:300]

    run(test, WAS_READY, largest_json_bytes=4 * 2**20)


@pytest.mark.parametrize(
    ("slo_ms", "lag_ms", "flooded", "spared"),
    [
        (20.0, 20.0, False, True),
        (20.0, 500.0, False, False),
        (400.0, 15.0, True, True),  # what it takes is little beside the SLO
        (400.0, 60.0, False, True),
        (math.inf, 60.0, True, True),  # nobody minds
        (math.inf, 300.0, False, True),
    ],
)
def test_when_the_scheduler_is_behind_it_refuses_first_who_asks_most(
    slo_ms: float, lag_ms: float, flooded: bool, spared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lag = SimpleNamespace(lag_ms=lag_ms, standing_ms=lag_ms)
    monkeypatch.setattr("services.scheduler.scheduler.LagMeter", lambda: lag)
    dead: Any = Dead()
    models = {name: Model(name, host=lambda number: dead) for name in ("flooded", "other")}
    scheduler = Scheduler(ServeConfig(), models, {})
    scheduler._shares = Shares(lambda: 0.0)  # real time would halve what was asked before
    other = scheduler.entrance("models/other")
    while other.least_slo_ms > slo_ms:  # one request has said how much of a hurry it is in, and met it
        with other.asking(Demand(slo_ms)):
            pass

    def admits(name: str) -> bool:
        try:
            scheduler.check_lag(f"/v2/models/{name}/infer")
        except OverloadError:
            return False
        return True

    assert admits("flooded")  # nothing is under way: refusing would not help
    with ExitStack() as under_way:
        for _ in range(8):
            under_way.enter_context(scheduler.under_way())
        assert [admits("flooded") for _ in range(40)] == [flooded] * 40
        assert [admits(f"no such model {number}") for number in range(40)][-1] is flooded
        assert admits("other") is spared


def test_a_loop_that_was_held_up_for_a_moment_is_not_behind() -> None:
    """Requests were refused, whatever their SLO, whenever another program had the processor."""
    lag = LagMeter()
    for late_ms in (200.0, 0.0, 150.0, 90.0, 0.5, 80.0, 70.0, 60.0, 50.0):
        lag.add(late_ms)
        assert lag.standing_ms < 1.0 and lag.waited_ms == late_ms <= lag.lag_ms
    lag.add(40.0)
    assert lag.standing_ms == 40.0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60))
def test_shares_are_relative_to_the_largest(asked: list[str]) -> None:
    shares = Shares(lambda: 0.0)
    for name in asked:
        shares.add(name)
    largest = max(map(asked.count, asked))
    for name in "abc":
        assert shares.of_largest(name) == pytest.approx(asked.count(name) / largest)


def test_requests_of_long_ago_say_nothing() -> None:
    clock = [0.0]
    shares = Shares(lambda: clock[0])
    for _ in range(1000):
        shares.add("flood")
    clock[0] = 30.0
    shares.add("other")
    assert shares.of_largest("other") == 1.0 and shares.of_largest("flood") == 0.0


HEADER = st.tuples(st.sampled_from([b"host", b"origin", b"x-api-key"]), st.binary(max_size=3))


@given(st.lists(HEADER, max_size=5))
def test_headers_are_found_as_the_framework_finds_them(raw: list[tuple[bytes, bytes]]) -> None:
    scope = {"type": "http", "headers": raw}
    own, theirs = _FastRequest(scope).headers, Request(scope).headers
    for name in ("Host", "origin", "X-API-Key", "absent"):
        assert own.get(name) == theirs.get(name)
        assert (name in own) == (name in theirs)
        if name in theirs:
            assert own[name] == theirs[name]
    assert own.getlist("host") == theirs.getlist("host") and own.raw == theirs.raw


class Connection:
    """A client that goes when the test says so."""

    def __init__(self) -> None:
        self.tell: Callable[[], None] | None = None

    def tell_when_gone(self, tell: Callable[[], None]) -> Callable[[], None]:
        self.tell = tell
        return self.forget

    def forget(self) -> None:
        self.tell = None


def gone(connection: Connection) -> Request:
    """A request of a client that goes."""
    return Request({"type": "http", "headers": [], "gati.connection": connection})


def test_work_ends_when_its_client_goes_and_its_task_goes_on() -> None:
    async def test() -> None:
        connection, cancelled = Connection(), []

        async def work() -> None:
            assert connection.tell is not None
            asyncio.get_running_loop().call_soon(connection.tell)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        with pytest.raises(CancelledError, match="the client has gone"):
            await unless_gone(gone(connection), work())
        own = asyncio.current_task()
        assert cancelled and own is not None and not own.cancelling() and connection.tell is None
        await asyncio.sleep(0)

    asyncio.run(test())


def test_what_is_cancelled_otherwise_stays_cancelled() -> None:
    async def test() -> None:
        connection = Connection()
        both = asyncio.create_task(unless_gone(gone(connection), asyncio.Event().wait()))
        await in_the_end(lambda: connection.tell is not None)
        assert connection.tell is not None
        connection.tell()
        both.cancel()
        alone = asyncio.create_task(unless_gone(gone(Connection()), asyncio.Event().wait()))
        await asyncio.sleep(0)
        alone.cancel()
        await asyncio.wait([both, alone])
        assert both.cancelled() and alone.cancelled()

    asyncio.run(test())


def test_an_answer_is_given_and_nobody_listens_any_more() -> None:
    async def test() -> None:
        connection = Connection()
        assert await unless_gone(gone(connection), asyncio.sleep(0, "answer")) == "answer"
        assert connection.tell is None

    asyncio.run(test())


@pytest.mark.parametrize("packed", [True, False])
def test_what_waits_to_be_read_ends_with_its_client(packed: bool) -> None:
    """What clients had given up was still decompressed and parsed, before the requests that came later."""

    async def test() -> None:
        scheduler, held = Scheduler(ServeConfig(), {}, {}), threading.Event()
        scheduler.pool = BoundedPool("test", threads=1)
        busy = asyncio.create_task(scheduler.pool.run(held.wait))
        body = b" " * 2**20 + json.dumps(BODY).encode()
        sent, connection = gzip.compress(body) if packed else body, Connection()
        headers = [(b"content-encoding", b"gzip" if packed else b"identity")]

        async def receive() -> Any:
            return {"type": "http.request", "body": sent}

        request = Request({"type": "http", "headers": headers, "gati.connection": connection}, receive)

        async def read() -> None:
            with scheduler.under_way() as charge:
                await read_inference(request, scheduler, charge)

        try:
            reading = asyncio.create_task(read())
            await asyncio.sleep(0)
            assert connection.tell is not None
            connection.tell()
            with pytest.raises(CancelledError, match="the client has gone"):
                await reading
        finally:
            held.set()
            await busy
            scheduler.pool.close()

    asyncio.run(test())


@pytest.mark.parametrize(("header", "client"), [(None, "127.0.0.1"), ("203.0.113.9", "203.0.113.9")])
def test_whom_a_proxy_of_this_machine_speaks_for_is_the_client(header: str | None, client: str) -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])

    server = web_server(ServeConfig(), app)
    headers = [] if header is None else [(b"x-forwarded-for", header.encode())]
    scope = {"type": "http", "headers": headers, "client": ("127.0.0.1", 1)}
    asyncio.run(server.config.loaded_app(scope, None, None))  # type: ignore[arg-type]
    assert seen == [client]


@pytest.mark.parametrize(("waited_s", "status"), [(0.0, 503), (60.0, 504)])
def test_who_waited_too_long_to_be_accepted_is_told_that_it_is_late(waited_s: float, status: int) -> None:
    async def main() -> None:
        dead: Any = Dead()
        model = Model("m", host=lambda number: dead)
        model.info = WAS_READY
        await model.start()
        front = Front(create_app(Scheduler(ServeConfig(), {"m": model}, {})))

        async def waited(scope: Any, receive: Any, send: Any) -> None:
            await front({**scope, "gati.waited_s": waited_s}, receive, send)

        tensor = {"name": "input", "shape": [1], "datatype": "FP32", "data": [0.0]}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(waited), base_url="http://localhost"
        ) as client:
            reply = await client.post("/v2/models/m/infer", json={"inputs": [tensor]})
        assert reply.status_code == status, reply.text
        await model.stop(0.0)

    asyncio.run(main())


@pytest.mark.parametrize(
    "path",
    [
        "/v2",
        "/v2/health/ready",
        "/v2/models/m/ready",
        "/metrics",
        "/docs",
        "/dashboard",
        "/dashboard/m/",
        "/none",
    ],
)
def test_a_head_request_gets_the_head_of_what_get_gets(path: str) -> None:
    """It was 405 for all but health."""

    async def test(client: httpx.AsyncClient) -> None:
        head, whole = await client.head(path), await client.get(path)
        assert head.status_code == whole.status_code != 405 and head.content == b""
        assert head.headers.get("content-type") == whole.headers.get("content-type")

    run(test)


def test_a_head_request_for_a_stream_ends() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.head("/dashboard/m/events")
        assert reply.headers["content-type"].startswith("text/event-stream")

    run(test)


def test_a_proxy_may_add_a_prefix_to_the_live_page() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.get("/dashboard")).headers["location"] == "dashboard/m/"

    run(test)


def test_a_server_that_leaves_closes_connections_and_then_ends_live_pages() -> None:
    """Clients that keep their connections came back until they were refused; each viewer cost a traceback."""

    async def main() -> None:
        dead: Any = Dead()
        scheduler = Scheduler(ServeConfig(), {"m": Model("m", host=lambda number: dead)}, {})
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in ("/v2", "/v2/models/none/infer"):
                before = await client.post(path)
                scheduler.leaving = True
                after = await client.post(path)
                scheduler.leaving = False
                assert before.status_code == after.status_code
                assert [each.headers.get("connection") for each in (before, after)] == [None, "close"]
            watching = asyncio.create_task(client.get("/dashboard/m/events"))
            await asyncio.sleep(0)
            await scheduler.drain()
            assert (await watching).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("under_way", [False, True])
def test_requests_have_the_time_to_drain_once(monkeypatch: pytest.MonkeyPatch, under_way: bool) -> None:
    """Those that it was too short for had it twice, and the unit killed the server meanwhile."""
    told: list[tuple[float, float]] = []

    async def stop(self: Model, timeout_s: float, *, answers_s: float) -> None:
        told.append((timeout_s, answers_s))

    async def main() -> None:
        dead: Any = Dead()
        models = {"m": Model("m", host=lambda number: dead)}
        scheduler = Scheduler(ServeConfig(drain_timeout_s=0.01 if under_way else LONG_S), models, {})
        with scheduler.under_way() if under_way else ExitStack():
            await scheduler.drain()
        ((timeout_s, answers_s),) = told
        assert timeout_s == scheduler.config.drain_timeout_s
        assert answers_s == 0.0 if under_way else answers_s > 0.0

    monkeypatch.setattr(Model, "stop", stop)
    asyncio.run(main())


class Late(Model):
    """Its answers come `late_s` after they were asked for."""

    def __init__(self, clock: Clock, late_s: float) -> None:
        super().__init__("m", address="127.0.0.1:1")
        self.info = SimpleNamespace(inputs=None, largest_batch=64, class_names=None)
        self._clock, self._late_s = clock, late_s

    async def infer(self, tensor: Any, asked: Asked, version: str | None = None) -> Any:
        self._clock.now_s += self._late_s
        return InferResponse([Answer(0, b"\0" * 4, "base")], "v", 0.0, 1.0)


@pytest.mark.parametrize(
    ("slo_ms", "late_s", "missed"), [(500.0, 0.6, 1.0), (500.0, 0.1, 0.0), (None, 9.0, 0.0)]
)
def test_an_slo_that_is_missed_is_counted(
    monkeypatch: pytest.MonkeyPatch, slo_ms: float | None, late_s: float, missed: float
) -> None:
    """It was for pipelines only."""
    clock = Clock()
    monkeypatch.setattr("services.scheduler.timing.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("services.scheduler.scheduler.time", SimpleNamespace(monotonic=clock))

    async def main() -> None:
        scheduler = Scheduler(ServeConfig(), {"m": Late(clock, late_s)}, {})
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        body = {**BODY, "parameters": {"latency_slo_ms": slo_ms}}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            reply = await client.post("/v2/models/m/infer", json=body)
        assert reply.json()["parameters"].get("slo_met") is (None if slo_ms is None else not missed)
        page = scheduler.metrics.render({}, {}, {}).decode()
        assert f'gati_request_slo_missed_total{{model="m"}} {missed}' in page

    asyncio.run(main())


def test_what_is_refused_while_the_server_ends_is_counted() -> None:
    dead: Any = Dead()
    scheduler = Scheduler(ServeConfig(), {"m": Model("m", host=lambda number: dead)}, {})
    scheduler.draining = True
    for name in ("models/m", "models/none", "pipelines/m", ""):
        with pytest.raises(UnavailableError, match="shutting down"):
            scheduler.under_way(name)
    page = scheduler.metrics.render({}, {}, {}).decode()
    for model, count in (("m", 1), ("", 3)):  # unknown names are no labels: clients choose them
        told = f'gati_rejected_total{{model="{model}",pipeline="",reason="unavailable"}} {count}.0'
        assert told in page
