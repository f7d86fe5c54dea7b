"""HTTP connections that are idle, slow, greedy or too many: real sockets, no timing assertions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from services.config import ServeConfig
from services.http import should_leave, waited_s
from services.web import listen, url_of, web_server
from services.wire.handshake import client_tls
from tests.services import faults
from tests.services.certificates import certify
from tests.waiting import LONG_S, in_the_end

pytestmark = pytest.mark.slow

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]

ASK = b"GET /now HTTP/1.1\r\nHost: x\r\n\r\n"
SHORT = ServeConfig(port=0, head_timeout_s=0.05, body_timeout_s=0.05)
PATIENT = ServeConfig(port=0, head_timeout_s=LONG_S, body_timeout_s=LONG_S)


class App:
    """Answers `/now` at once, `/later` when it is let go, `/endless` for as long as anybody reads.

    `/echo` returns the body and the headers of the connection, `/large` 16 MiB.
    """

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun: list[str] = []
        self.full: list[bool] = []
        self.left: list[str] = []
        self.waited_s: list[float] = []
        self.protocol: Any = None  # of its connections

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.begun.append(path)
        self.waited_s.append(waited_s(scope))
        if path == "/body":
            while (message := await receive()).get("more_body"):
                continue
            if message["type"] == "http.disconnect":
                self.left.append(path)
                return
        if path == "/echo":
            await echo(scope, receive, send)
            return
        if path == "/later":
            await self.go.wait()
            self.full.append(should_leave(scope))
        endless = path == "/endless"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while endless and (await self.more(receive, send)):
            continue
        body = b"x" * 2**24 if path == "/large" else b"done"
        await send({"type": "http.response.body", "body": body})

    def allow(self, config: ServeConfig) -> None:
        """Give clients other times from now on.

        Between connecting and asking, this process may wait for its turn for longer than the short ones.
        """
        limits = self.protocol._limits
        self.protocol._limits = replace(
            limits, head_timeout_s=config.head_timeout_s, body_timeout_s=config.body_timeout_s
        )

    async def more(self, receive: Any, send: Any) -> bool:
        try:
            async with asyncio.timeout(0.001):
                gone = (await receive())["type"] == "http.disconnect"
        except TimeoutError:
            gone = False
        if gone:
            self.left.append("/endless")
            return False
        await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})
        return True


async def echo(scope: Any, receive: Any, send: Any) -> None:
    content, more = b"", True
    while more:
        message = await receive()
        content, more = content + message["body"], message.get("more_body", False)
    of_connection = [value for name, value in scope["headers"] if name in (b"connection", b"upgrade")]
    content = b"|".join((content, *of_connection))
    headers = [(b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def run(config: ServeConfig, test: Callable[[App, Connect], Awaitable[None]]) -> None:
    async def main() -> None:
        async with served(config) as (app, connect, _):
            await test(app, connect)

    uvloop.run(main())


@asynccontextmanager
async def served(config: ServeConfig) -> AsyncIterator[tuple[App, Connect, tuple[str, int]]]:
    app, listening = App(), listen(config)
    place = listening.getsockname()
    server = web_server(config, app)
    app.protocol = server.config.http_protocol_class
    serving = asyncio.create_task(server.serve([listening]))
    opened: list[asyncio.StreamWriter] = []
    trusting = client_tls(config.certificate)

    async def connect() -> Connection:
        connection = await asyncio.open_connection(*place, ssl=trusting)
        opened.append(connection[1])
        return connection

    await in_the_end(lambda: server.started)
    try:
        yield app, connect, place
    finally:
        app.go.set()
        for each in opened:
            each.transport.abort()
        server.should_exit = True
        await serving


async def status(connection: Connection, data: bytes = ASK) -> int:
    reader, writer = connection
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1])


async def closed(connection: Connection) -> None:
    """Wait until the server has closed it."""
    with contextlib.suppress(ConnectionError):
        while await connection[0].read(65_536):
            continue


async def begun(app: App, connection: Connection) -> bool:
    """Wait until the application has a request; False if the server has closed the connection before."""
    reader, _ = connection
    await in_the_end(lambda: bool(app.begun) or reader.at_eof() or reader.exception() is not None)
    return bool(app.begun)


@contextlib.contextmanager
def room_for_files(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


ECHO_CHUNKS = b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
POST = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\r\n", id="an empty line"),
        pytest.param(b"GET /now HT", id="half a request line"),
        pytest.param(b"GET /now HTTP/1.1\r\nHost: x\r\nX: ", id="half a head"),
        pytest.param(ASK + b"GET /no", id="half of the next head"),
        pytest.param(POST, id="a head without its body"),
        pytest.param(POST + b"x" * 1000, id="half a body"),
        pytest.param(b"POST /body HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", id="half a chunk"),
        pytest.param(b"POST /now HTTP/1.1\r\nContent-Length: 100000\r\n\r\n", id="an answered half"),
    ],
)
def test_a_client_that_says_no_more_is_let_go(sent: bytes) -> None:
    async def test(app: App, connect: Connect) -> None:
        silent = await connect()
        silent[1].write(sent)
        await closed(silent)
        assert app.left == (["/body"] if "/body" in app.begun else [])
        app.allow(PATIENT)
        assert await status(await connect()) == 200

    run(SHORT, test)


@pytest.mark.parametrize("sent", [b"\r\n", b"GET /no"], ids=["an empty line", "half a head"])
def test_a_client_that_has_been_answered_and_says_no_more_is_let_go(sent: bytes) -> None:
    async def test(app: App, connect: Connect) -> None:
        silent = await connect()
        assert await status(silent) == 200
        app.allow(SHORT)
        silent[1].write(sent)
        await closed(silent)

    run(PATIENT, test)


def test_who_waits_for_an_answer_is_not_cut_off() -> None:
    async def test(app: App, connect: Connect) -> None:
        patient = await connect()
        patient[1].write(ASK.replace(b"now", b"later"))
        while not await begun(app, patient):  # let go before it could ask, so it waited for no answer
            patient = await connect()
            patient[1].write(ASK.replace(b"now", b"later"))
        for _ in range(3):  # later ones have come and been let go meanwhile
            await closed(await connect())
        app.go.set()
        assert await status(patient, b"") == 200

    run(SHORT, test)


def test_a_head_that_never_ends_is_not_kept() -> None:
    """64 MB of it were, and the connection with them; of trailers, all that fitted into memory."""

    async def test(app: App, connect: Connect) -> None:
        heads = (b"GET /", b"GET /now HTTP/1.1\r\nX: ", ASK.replace(b"now", b"later") + b"GET /")
        for start in (*heads, ECHO_CHUNKS + b"1;", ECHO_CHUNKS + b"1\r\nx\r\n0\r\nX: "):
            _, writer = await connect()
            writer.write(start)
            with pytest.raises(ConnectionError):
                for _ in range(1000):
                    writer.write(b"x" * 65_536)
                    await writer.drain()

    run(PATIENT, test)


def test_trailers_are_no_headers() -> None:
    async def test(app: App, connect: Connect) -> None:
        connection = await connect()
        trailers = b"Connection: trailer\r\nUpgrade: trailer\r\n"
        assert await status(connection, ECHO_CHUNKS + b"1\r\nx\r\n0\r\n" + trailers + b"\r\n" + ASK) == 200
        assert await connection[0].readexactly(13) == b"xHTTP/1.1 200"

    run(PATIENT, test)


@pytest.mark.parametrize("headers", [b"X: " + b"y" * 70_000 + b"\r\n", b"a: b\r\n" * 101])
def test_a_head_that_is_too_large_is_refused(headers: bytes) -> None:
    async def test(app: App, connect: Connect) -> None:
        connection = await connect()
        connection[1].write(b"GET /now HTTP/1.1\r\n" + headers + b"\r\n")
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            assert await status(connection, b"") == 431
        assert app.begun == []
        assert await status(await connect(), ASK[:-2] + b"a: b\r\n" * 90 + b"\r\n") == 200

    run(PATIENT, test)


@pytest.mark.parametrize("sent", [b"", b"GET /now HT", POST], ids=["silent", "half a head", "half a body"])
def test_many_silent_clients_keep_nobody_out(sent: bytes) -> None:
    async def test(app: App, connect: Connect) -> None:
        working = await connect()
        working[1].write(ASK.replace(b"now", b"later"))
        await in_the_end(lambda: "/later" in app.begun)
        crowd = [await connect() for _ in range(16)]
        for _, writer in crowd:
            writer.write(sent)
        for _ in range(3):
            assert await status(await connect()) == 200
        app.go.set()
        assert await status(working, b"") == 200  # whoever had asked before got an answer
        await closed(crowd[0])

    run(PATIENT.model_copy(update={"most_connections": 8}), test)


def test_a_client_that_does_not_read_is_let_go() -> None:
    async def test(app: App, connect: Connect) -> None:
        _, writer = await connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(ASK.replace(b"now", b"endless"))
        await in_the_end(lambda: app.left == ["/endless"])

    run(PATIENT.model_copy(update={"body_timeout_s": 0.05}), test)


LARGE = ASK.replace(b"now", b"large")
LAST = LARGE[:-2] + b"Connection: close\r\n\r\n"


def test_a_client_that_does_not_read_its_last_reply_is_let_go() -> None:
    """The reply was kept for as long as the client stayed, and the connection was not counted."""

    async def test(app: App, connect: Connect) -> None:
        _, writer = await connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(LAST)

        def closed() -> bool:  # only noticed by writing
            writer.write(b"x")
            return writer.transport.is_closing()

        await in_the_end(closed)

    run(PATIENT.model_copy(update={"body_timeout_s": 0.05}), test)


def test_replies_that_nobody_reads_take_little_memory() -> None:
    """Each was kept for half a minute, in as many connections as there may be; with `close`, for ever."""
    large = 2**24  # much more than the system keeps

    async def received(connection: Connection, most: int = large) -> int:
        connection[1].transport.resume_reading()  # type: ignore[attr-defined]
        count = 0
        with contextlib.suppress(ConnectionError):
            while count < most and (data := await connection[0].read(2**20)):
                count += len(data)
        return count

    async def test(app: App, connect: Connect) -> None:
        slow = await connect()
        slow[1].write(LARGE)
        read = await received(slow, large // 3)
        silent = []
        for number in range(6):
            silent.append(await connect())
            silent[-1][1].transport.pause_reading()  # type: ignore[attr-defined]
            silent[-1][1].write(LAST if number % 2 else LARGE)
            await in_the_end(lambda number=number: len(app.begun) == number + 2)  # type: ignore[misc]
        assert read + await received(slow, large - read) >= large, "who reads is not let go"
        counts = [await received(each) for each in silent]
        assert sum(count >= large for count in counts) <= 3

    run(PATIENT.model_copy(update={"largest_held_bytes": 2 * large}), test)


@pytest.mark.parametrize("framing", [b"Content-Length: 4194304\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_a_client_that_still_sends_a_refused_body_gets_its_last_reply(framing: bytes) -> None:
    """The connection was reset, so clients that close it, such as urllib, never saw why they were refused."""
    body = b"x" * 2**22  # more than the system keeps
    if b"chunked" in framing:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)

    async def test(app: App, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(b"POST /now HTTP/1.1\r\nConnection: close\r\n" + framing + b"\r\n")
        await in_the_end(lambda: app.begun == ["/now"])
        writer.write(body + ASK.replace(b"now", b"next"))
        await writer.drain()
        reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 200") and reply.count(b"HTTP/1.1") == 1
        assert app.begun == ["/now"], "what follows the last request is not served"

    run(PATIENT, test)


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
def test_what_is_no_body_gets_no_second_reply(connection: bytes) -> None:
    """A client or proxy that keeps connections took it for the reply to its next request."""

    async def test(app: App, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(
            b"POST /now HTTP/1.1\r\nConnection: " + connection + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        reply = await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"no size\r\n")
        assert reply.startswith(b"HTTP/1.1 200") and await reader.read() == b""

    run(PATIENT, test)


def test_no_body_is_awaited_of_a_client_that_was_not_told_to_continue() -> None:
    """Its connection stayed open for half a minute after the last reply."""

    async def test(app: App, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(
            b"POST /now HTTP/1.1\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"
        )
        async with asyncio.timeout(LONG_S / 2):
            reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 200") and reply.count(b"HTTP/1.1") == 1

    run(PATIENT, test)


def test_a_stream_ends_with_its_client_whatever_else_that_asked_for() -> None:
    """Only the last of the requests on a connection was told, and streams before it went on for ever."""

    async def test(app: App, connect: Connect) -> None:
        _, writer = await connect()
        writer.write(ASK.replace(b"now", b"endless") + ASK)
        await in_the_end(lambda: app.begun == ["/endless"])
        writer.transport.abort()
        await in_the_end(lambda: app.left == ["/endless"])
        assert app.begun == ["/endless"]

    run(PATIENT, test)


def test_requests_that_wait_for_the_one_before_are_few() -> None:
    async def test(app: App, connect: Connect) -> None:
        greedy = await connect()
        greedy[1].write(ASK.replace(b"now", b"later") + ASK * 200)
        await closed(greedy)
        modest = await connect()
        app.go.set()
        assert await status(modest, ASK * 10) == 200

    run(PATIENT, test)


def test_the_url_of_an_ipv6_address_is_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert url_of(ServeConfig(host="::1"), listening) == f"http://[::1]:{port}"
        assert url_of(ServeConfig(), listening) == f"http://127.0.0.1:{port}"


SWITCH = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: x\r\n" + SWITCH
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"


async def echoed(connection: Connection) -> bytes:
    reader, _ = connection
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))


@pytest.mark.parametrize(
    "parts",
    [
        [POST + b"Content-Length: 5\r\n\r\nhello"],
        [POST + b"Content-Length: 5\r\n\r\n", b"hello"],
        [POST[:60], POST[60:] + b"Content-Length: 5\r\n\r\nhe", b"llo"],
        [POST + CHUNKED],
    ],
    ids=["in one piece", "body apart", "in pieces", "chunked"],
)
def test_the_body_of_a_request_that_would_switch_to_http_2_is_read(parts: list[bytes]) -> None:
    """Java's client sends such requests: their bodies were skipped, and taken for further requests."""

    async def test(app: App, connect: Connect) -> None:
        connection = await connect()
        for part in parts:
            connection[1].write(part)
            await connection[1].drain()
            await asyncio.sleep(0.01)
        assert await echoed(connection) == b"hello|"
        last = POST.replace(b"Upgrade,", b"close, upgrade,") + b"Content-Length: 1\r\n\r\n!"
        connection[1].write(ASK + last)
        assert await status(connection, b"") == 200
        await connection[0].readuntil(b"done\r\n0\r\n\r\n")
        assert await echoed(connection) == b"!|close"
        await closed(connection)
        assert app.begun == ["/echo", "/now", "/echo"]

    run(PATIENT, test)


def test_no_body_becomes_a_request_of_its_own() -> None:
    async def test(app: App, connect: Connect) -> None:
        connection = await connect()
        connection[1].write(POST + b"Content-Length: %d\r\n\r\n" % len(ASK) + ASK)
        assert await echoed(connection) == ASK + b"|"
        tunnel = await connect()
        assert await status(tunnel, b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + ASK) == 400
        await closed(tunnel)
        assert app.begun == ["/echo"]

    run(PATIENT, test)


def test_many_requests_that_would_switch_are_as_few_as_others() -> None:
    async def test(app: App, connect: Connect) -> None:
        greedy = await connect()
        greedy[1].write(ASK.replace(b"now", b"later") + (POST + b"\r\n").replace(b"POST", b"GET") * 1500)
        await closed(greedy)
        assert await status(await connect()) == 200

    run(PATIENT, test)


def test_clients_that_never_speak_tls_keep_nobody_out(tmp_path: Path) -> None:
    """Each of them had a file, however many they were."""
    certificate, key = certify(tmp_path)
    crowd, most = 1000, 40

    async def main() -> None:
        changes = {"certificate": certificate, "certificate_key": key, "most_connections": most}
        config = PATIENT.model_copy(update=changes | {"head_timeout_s": 10 * LONG_S})
        loop = asyncio.get_running_loop()
        async with served(config) as (_, connect, place):
            files = len(os.listdir("/proc/self/fd"))
            with contextlib.ExitStack() as held:
                silent = []
                for number in range(crowd):
                    client = held.enter_context(socket.socket())
                    client.setblocking(False)
                    await loop.sock_connect(client, place)
                    await loop.sock_sendall(client, b"\x16\x03"[: number % 3])
                    silent.append(client)
                    if number % 100 == 0:
                        assert await status(await connect()) == 200
                assert await status(await connect()) == 200
                own = files + crowd + 2 * 11  # both ends of who was answered are in this process
                await in_the_end(lambda: len(os.listdir("/proc/self/fd")) <= own + most)
                for client in silent[: crowd - most]:
                    with contextlib.suppress(ConnectionError):
                        assert await loop.sock_recv(client, 1) == b""

    with room_for_files(len(os.listdir("/proc/self/fd")) + crowd + 500):  # tests before may have left some
        uvloop.run(main())


def test_a_flood_of_connections_resets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that came were taken, and the newest ones closed before what they had sent was read."""
    monkeypatch.setattr("services.http._SILENT_S", LONG_S)  # else those that are read late make room

    async def test(app: App, connect: Connect) -> None:
        crowd = [await connect() for _ in range(20)]
        for _, writer in crowd:
            writer.write(ASK.replace(b"now", b"later"))
        await in_the_end(lambda: app.begun == ["/later"] * 3)
        app.go.set()
        for each in crowd:  # in the order in which they came
            assert await status(each, b"") == 200
            each[1].close()
        assert len(app.begun) == len(crowd) and app.full[:3] == [True] * 3

    run(PATIENT.model_copy(update={"most_connections": 3}), test)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the system does not tell")
def test_the_wait_for_a_place_counts_for_the_request_that_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests were answered after their deadlines, which began when their connections were accepted."""
    monkeypatch.setattr("services.http._SILENT_S", LONG_S)  # else the first makes room if it is read late

    async def test(app: App, connect: Connect) -> None:
        began_s = time.monotonic()
        first, second = await connect(), await connect()
        first[1].write(ASK.replace(b"now", b"later"))
        await in_the_end(lambda: app.begun == ["/later"])
        asked_s = time.monotonic()
        second[1].write(ASK)
        await asyncio.sleep(0.2)
        app.go.set()
        assert await status(first, b"") == 200
        first[1].close()
        assert await status(second, b"") == 200
        longest_s = time.monotonic() - asked_s
        await second[0].readuntil(b"0\r\n\r\n")
        assert await status(second) == 200
        tick_s = 0.01  # of the system's clock
        assert app.waited_s[0] <= asked_s - began_s + tick_s
        assert 0.2 - tick_s <= app.waited_s[1] <= longest_s + tick_s and app.waited_s[2] == 0.0

    run(PATIENT.model_copy(update={"most_connections": 1}), test)


def test_connections_wait_while_no_file_can_be_opened() -> None:
    """They were taken and closed at once."""

    async def main() -> None:
        async with served(PATIENT) as (_, _, place):
            with socket.socket() as client:
                with faults.no_files_left(os.getpid()), contextlib.ExitStack() as held:
                    with pytest.raises(OSError, match="Too many open files"):
                        while True:
                            held.enter_context(open(os.devnull))
                    client.connect(place)
                    client.sendall(ASK)
                    client.setblocking(False)
                    await asyncio.sleep(0.1)
                    with pytest.raises(BlockingIOError):  # neither answered nor closed
                        client.recv(1)
                head = await asyncio.get_running_loop().sock_recv(client, 1000)
                assert head.startswith(b"HTTP/1.1 200 ")

    uvloop.run(main())
