"""Thrift on asyncio: against the Thrift library's own client, and against invalid messages."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.Thrift import TApplicationException
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TFramedTransport

from gati.errors import (
    CompositionError,
    ConfigError,
    DeadlineError,
    GatiError,
    NotFoundError,
    OverloadError,
    RequestError,
    UnavailableError,
)
from services.wire.client import WireClient, connect_to, notice_loss
from services.wire.codec import Frames, Limits, Service, encode_parts
from services.wire.errors import from_wire, to_wire
from services.wire.gen import Inference
from services.wire.gen.ttypes import (
    Answer,
    ErrorCode,
    Health,
    InferRequest,
    InferResponse,
    ServiceError,
    Tensor,
    VersionSource,
)
from services.wire.handshake import client_tls, server_tls
from services.wire.server import WireServer
from services.wire.tensors import DATATYPES, from_bytes, from_tensor, text_tensor, texts_of, to_tensor
from tests.services.certificates import certify
from tests.services.frames import encode
from tests.waiting import LONG_S, in_the_end

SERVICE = Service(Inference)


def request(name: str = "a", data: bytes = b"\0" * 4) -> Any:
    return InferRequest(name, Tensor("FP32", [len(data) // 4], data), 1000, "0" * 32)


class Handlers:
    """`infer` answers at once, or, where the test holds a request, when it lets it go."""

    def __init__(self) -> None:
        self.held: dict[str, asyncio.Event] = {}
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.posted: list[str] = []

    def hold(self, name: str) -> Any:
        """A request of that name that is answered when its event is set."""
        self.held[name] = asyncio.Event()
        return request(name)

    async def infer(self, request: Any) -> Any:
        if request.request_id == "refuse":
            raise OverloadError("too much", retry_after_s=0.25)
        if request.request_id == "mistake":
            raise ZeroDivisionError
        try:
            self.begun.append(request.request_id)
            if request.request_id in self.held:
                await self.held[request.request_id].wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        return InferResponse([Answer(1, request.input.data, "base")], request.request_id, 0.0, 0.0)

    async def health(self) -> Any:
        return Health(True, False, "serving")

    async def cancel(self, request_id: str) -> None:
        self.posted.append(request_id)


def run(test: Callable[[WireServer, Handlers, int], Awaitable[None]], **options: Any) -> None:
    """Run a test against a server of its own."""

    async def main() -> None:
        handlers = Handlers()
        names = ("infer", "health", "cancel")
        server = WireServer(SERVICE, {name: getattr(handlers, name) for name in names}, **options)
        port = await server.start("127.0.0.1", 0)
        try:
            await test(server, handlers, port)
        finally:
            await server.drain(1.0)

    asyncio.run(main())


async def connect(port: int, **options: Any) -> WireClient:
    client = WireClient(SERVICE, "127.0.0.1", port, **options)
    await client.connect()
    return client


def test_the_thrift_librarys_own_client_is_understood() -> None:
    def blocking(port: int) -> None:
        transport = TFramedTransport(TSocket("127.0.0.1", port))
        transport.open()
        client = Inference.Client(TBinaryProtocol(transport))
        assert client.health().ready is True
        assert client.infer(request("b")).version == "b"
        with pytest.raises(ServiceError) as refused:
            client.infer(request("refuse"))
        assert (refused.value.code, refused.value.retry_after_ms) == (ErrorCode.RESOURCE_EXHAUSTED, 250)
        with pytest.raises(TApplicationException, match="internal error"):
            client.infer(request("mistake"))
        with pytest.raises(TApplicationException, match="no call 'describe'"):
            client.describe()
        assert client.health().ready is True
        transport.close()

    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        await asyncio.to_thread(blocking, port)

    run(test)


def test_answers_come_in_any_order_on_one_connection() -> None:
    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        client = await connect(port)
        order: list[str] = []

        async def ask(name: str) -> None:
            order.append((await client.call("infer", handlers.hold(name), timeout_s=LONG_S)).version)

        asking = [asyncio.create_task(ask(name)) for name in ("slow", "quick", "between")]
        await in_the_end(lambda: len(handlers.begun) == 3)
        for name, task in (("quick", asking[1]), ("between", asking[2]), ("slow", asking[0])):
            handlers.held[name].set()
            await task
        assert handlers.begun == ["slow", "quick", "between"] and order == ["quick", "between", "slow"]
        client.post("cancel", "x")
        await client.call("health", timeout_s=LONG_S)
        assert handlers.posted == ["x"]
        await client.close()

    run(test)


def test_calls_of_a_lost_connection_are_cancelled() -> None:
    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        client = await connect(port)
        task = asyncio.create_task(client.call("infer", handlers.hold("long"), timeout_s=LONG_S))
        await in_the_end(lambda: handlers.begun == ["long"])
        await client.close()
        with pytest.raises((UnavailableError, asyncio.CancelledError)):
            task.cancel()
            await task
        await in_the_end(lambda: handlers.cancelled == ["long"])

    run(test)


def test_a_late_answer_is_a_deadline_and_the_connection_goes_on() -> None:
    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        client = await connect(port)
        with pytest.raises(DeadlineError, match="no answer within 20 ms"):
            await client.call("infer", handlers.hold("slow"), timeout_s=0.02)
        await in_the_end(lambda: handlers.begun == ["slow"])
        handlers.held["slow"].set()  # its answer comes, before the next one, and nobody waits for it
        assert (await client.call("infer", request("next"), timeout_s=LONG_S)).version == "next"
        assert handlers.cancelled == []
        await client.close()

    run(test)


def test_a_connection_outlives_its_largest_sequence_number() -> None:
    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        client = await connect(port)
        client._sequence = 2**31 - 3
        for name in "abcde":
            assert (await client.call("infer", request(name), timeout_s=LONG_S)).version == name
            client.post("cancel", name)
        await in_the_end(lambda: handlers.posted == list("abcde"))
        await client.close()

    run(test)


def test_a_reply_that_is_too_large_is_an_error_at_once() -> None:
    """The caller need not wait for its deadline, and the connection goes on."""

    async def large() -> Any:
        return Health(True, False, "x" * 5000)

    async def infer(request: Any) -> Any:
        long = b"\0" * (5000 if request.request_id == "large" else 8)
        return InferResponse([Answer(0, long, "base")], "v", 0.0, 0.0)

    async def main() -> None:
        server = WireServer(SERVICE, {"health": large, "infer": infer}, limits=Limits(frame_bytes=1000))
        client = await connect(await server.start("127.0.0.1", 0))
        with pytest.raises(RequestError, match=r"the reply to 'infer' cannot be sent: .* limit is 1000"):
            await client.call("infer", request("large"), timeout_s=LONG_S)
        with pytest.raises(UnavailableError, match="the reply to 'health' cannot be sent"):  # has no errors
            await client.call("health", timeout_s=LONG_S)
        assert (await client.call("infer", request("small"), timeout_s=LONG_S)).version == "v"
        await client.close()
        await server.drain(0.0)

    asyncio.run(main())


def test_a_server_that_goes_ends_all_calls() -> None:
    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        client = await connect(port)
        task = asyncio.create_task(client.call("infer", handlers.hold("long"), timeout_s=LONG_S))
        await in_the_end(lambda: handlers.begun == ["long"])
        await server.drain(0.05)
        with pytest.raises(UnavailableError, match="was lost"):
            await task
        with pytest.raises(UnavailableError, match="is lost"):
            await client.call("health", timeout_s=LONG_S)

    run(test)


def test_draining_lets_calls_end() -> None:
    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        client = await connect(port)
        task = asyncio.create_task(client.call("infer", handlers.hold("soon"), timeout_s=LONG_S))
        await in_the_end(lambda: handlers.begun == ["soon"])
        draining = asyncio.create_task(server.drain(LONG_S))
        await asyncio.sleep(0)  # it has begun
        handlers.held["soon"].set()
        assert (await task).version == "soon"
        await draining

    run(test)


def test_connections_are_bounded() -> None:
    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        first, second = await connect(port), await connect(port)
        await first.call("health", timeout_s=LONG_S)
        await second.call("health", timeout_s=LONG_S)
        third = await connect(port)
        with pytest.raises(UnavailableError):
            await third.call("health", timeout_s=LONG_S)
        assert (await first.call("health", timeout_s=LONG_S)).ready

    run(test, most_connections=2)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
def test_clients_that_do_not_show_the_secret_keep_nobody_out(tmp_path: Path, encrypted: bool) -> None:
    """As many as there may be kept all others out for a minute; with TLS they were not even counted."""
    certificate, key = certify(tmp_path) if encrypted else (None, None)

    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
        client = await connect(port, secret=SECRET, tls=client_tls(certificate))
        crowd += [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
        assert (await client.call("health", timeout_s=LONG_S)).ready  # who has shown it stays
        async with asyncio.timeout(LONG_S):
            for reader, _ in crowd[:-2]:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
        for _, writer in crowd:
            writer.close()
        await client.close()

    tls = server_tls(certificate, key)
    run(test, secret=SECRET, tls=tls, most_connections=2, frame_timeout_s=10 * LONG_S)


def test_a_machine_that_has_gone_silently_is_noticed_by_the_system() -> None:
    """What it had been asked waited for its deadline, and could not be asked elsewhere."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
        listening.accept()[0] as server,
    ):
        notice_loss(client.fileno())
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        client.sendall(b"still here")
        assert server.recv(100) == b"still here"


def test_nobody_answers_where_nobody_listens() -> None:
    async def main() -> None:
        with pytest.raises(UnavailableError, match=r"nothing answers at 127\.0\.0\.1:9"):
            await WireClient(SERVICE, "127.0.0.1", 9).connect()

    asyncio.run(main())


def malformed(seed: int) -> bytes:
    """Bytes that are no whole message: noise, cut or changed messages, lengths that lie."""
    dice = random.Random(seed)
    whole = encode("infer", 1, 1, SERVICE.arguments["infer"](request(data=b"\0" * 64)), Limits())
    kind = seed % 5
    if kind == 0:
        return dice.randbytes(dice.randint(1, 200))
    if kind == 1:
        return struct.pack("!i", dice.randint(1, 300)) + dice.randbytes(300)
    if kind == 2:
        return struct.pack("!i", dice.choice([-1, 0, 2**31 - 1, 10**9])) + b"\0" * 50
    payload = bytearray(whole[4:])
    if kind == 3:
        payload = payload[: dice.randint(1, len(payload) - 1)]
    else:
        for _ in range(dice.randint(1, 8)):
            payload[dice.randrange(len(payload))] = dice.randrange(256)
    return struct.pack("!i", len(payload)) + bytes(payload)


def test_malformed_frames_harm_nobody_else() -> None:
    """500 of them, while a well-behaved connection goes on."""

    def throw(port: int, data: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=LONG_S) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(LONG_S)
            while connection.recv(4096):
                continue

    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        client = await connect(port)
        for seed in range(500):
            await asyncio.to_thread(throw, port, malformed(seed))
            if seed % 50 == 0:
                assert (await client.call("infer", request("good"), timeout_s=LONG_S)).version == "good"
        assert (await client.call("health", timeout_s=LONG_S)).ready
        await client.close()

    run(test, limits=Limits(frame_bytes=10_000))


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(0, 250), max_size=8),
)
def test_frames_are_found_wherever_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    sent = b"".join(struct.pack("!i", len(body)) + body for body in bodies)
    frames, found, begin = Frames(Limits()), [], 0
    for end in [*sorted(cuts), len(sent)]:
        found += frames.take(sent[begin:end])
        begin = max(begin, end)
    assert found == bodies
    assert not frames.partial


def test_a_frame_of_an_impossible_length_is_no_frame() -> None:
    frames = Frames(Limits(frame_bytes=100))
    assert frames.take(struct.pack("!i", 100)) == []
    assert frames.partial
    for length in (0, -1, 101):
        with pytest.raises(RequestError, match="1 to 100 are allowed"):
            Frames(Limits(frame_bytes=100)).take(struct.pack("!i", length))


def test_who_says_nothing_is_let_go_unless_an_answer_is_under_way() -> None:
    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        busy = await connect(port)
        asking = asyncio.create_task(busy.call("infer", handlers.hold("held"), timeout_s=LONG_S))
        await in_the_end(lambda: "held" in handlers.begun)
        server._idle_timeout_s = 0.05  # only now: else it is let go where this process is late to ask
        assert (await busy.call("health", timeout_s=LONG_S)).ready
        idle = await connect(port)  # later than what `busy` has said last
        assert await idle.lost(LONG_S)
        handlers.held["held"].set()
        assert (await asking).version == "held"
        await busy.close()
        await idle.close()

    run(test, idle_timeout_s=10 * LONG_S)


def test_required_fields_are_required() -> None:
    bare = SERVICE.arguments["infer"](InferRequest("a", Tensor("FP32", [1], b"0000"), 1, "t"))
    frame = encode("infer", 1, 7, bare, Limits())
    assert SERVICE.decode(frame[4:], Limits()).body.request.request_id == "a"
    with pytest.raises(RequestError, match="not a Thrift message"):
        SERVICE.decode(_without_input(), Limits())


def _without_input() -> bytes:
    from thrift.transport.TTransport import TMemoryBuffer

    buffer = TMemoryBuffer()
    protocol = TBinaryProtocol(buffer)
    protocol.writeMessageBegin("infer", 1, 7)
    protocol.writeStructBegin("args")
    protocol.writeFieldBegin("request", 12, 1)
    protocol.writeStructBegin("InferRequest")
    protocol.writeFieldStop()
    protocol.writeFieldStop()
    protocol.writeMessageEnd()
    return bytes(buffer.getvalue())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(DATATYPES)), st.lists(st.integers(0, 4), min_size=0, max_size=4), st.randoms())
def test_tensors_survive_the_wire(datatype: str, shape: list[int], dice: random.Random) -> None:
    size = int(np.prod(shape)) * DATATYPES[datatype].itemsize
    tensor = Tensor(datatype, shape, bytes(dice.randrange(2) for _ in range(size)))
    frame = encode("infer", 1, 1, SERVICE.arguments["infer"](InferRequest("a", tensor, 1, "t")), Limits())
    found = SERVICE.decode(frame[4:], Limits()).body.request.input
    again = to_tensor(from_tensor(found))
    assert (again.datatype, again.shape, again.data) == (datatype, shape, tensor.data)


@pytest.mark.parametrize("name", ["infer", "cancel", "load", "activate", "unload"])
def test_a_call_without_its_argument_is_none(name: str) -> None:
    """`activate` of nothing left a model without a version that answers."""
    bare = encode(name, 1, 1, SERVICE.arguments[name](), Limits())
    with pytest.raises(RequestError, match=f"the call '{name}' lacks an argument"):
        SERVICE.decode(bare[4:], Limits())


def test_calls_are_made_in_the_way_that_the_idl_has_them() -> None:
    """`cancel` has no result to answer with; one that is to have it raised where nobody heard."""

    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        client = await connect(port)
        client.post("health")
        with pytest.raises(UnavailableError, match="no call 'cancel'"):
            await client.call("cancel", "x", timeout_s=LONG_S)
        assert handlers.posted == []
        await client.close()

    run(test)


def test_large_tensors_survive_the_wire() -> None:
    data = np.random.default_rng(0).standard_normal((32, 3, 224, 224)).astype(np.float32)
    asked = InferRequest("a", to_tensor(data), 1, "t")
    frame = encode("infer", 1, 1, SERVICE.arguments["infer"](asked), Limits())
    assert len(frame) > 16_384_000  # the library's own limit
    np.testing.assert_array_equal(from_tensor(SERVICE.decode(frame[4:], Limits()).body.request.input), data)
    view = memoryview(data).cast("B")
    asked.input.data = view
    parts = encode_parts("infer", 1, 1, SERVICE.arguments["infer"](asked), Limits())
    assert b"".join(parts) == frame and any(part is view for part in parts), "it was copied"
    with pytest.raises(RequestError, match="the limit is 1000"):
        encode("infer", 1, 1, SERVICE.arguments["infer"](asked), Limits(frame_bytes=1000))


@pytest.mark.parametrize(
    ("datatype", "shape", "message"),
    [("FP8", [1], "not one of"), ("FP32", [2], "takes 8 bytes, got 4"), ("FP32", [-1], "is invalid")],
)
def test_tensors_that_are_none(datatype: str, shape: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        from_bytes(datatype, shape, b"\0" * 4)


@pytest.mark.parametrize(
    "error",
    [RequestError("a"), NotFoundError("b"), CompositionError("c"), DeadlineError("e")]
    + [OverloadError("d", retry_after_s=0.5), UnavailableError("f", retry_after_s=2.0)],
)
def test_errors_survive_the_wire(error: GatiError) -> None:
    found = from_wire(to_wire(error))
    assert (type(found), str(found)) == (type(error), str(error))
    assert getattr(found, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_the_generated_code_is_that_of_the_idl(repository: Path, tmp_path: Path) -> None:
    try:
        version = subprocess.run(["thrift", "--version"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        pytest.skip("needs the Thrift compiler (Debian: thrift-compiler)")
    committed = repository / "services" / "wire" / "gen"
    made_with = (committed / "ttypes.py").read_text(encoding="utf-8").split("(")[1].split(")")[0]
    if made_with not in version:
        pytest.skip(f"the code was made with compiler {made_with}, here is {version.strip()}")
    idl = repository / "thrift" / "gati.thrift"
    subprocess.run(["thrift", "--gen", "py", "-out", str(tmp_path), str(idl)], check=True)
    for file in (tmp_path / "services" / "wire" / "gen").glob("*.py"):
        assert file.read_bytes() == (committed / file.name).read_bytes(), f"run make thrift: {file.name}"


SECRET = b"0123456789abcdef"


def test_a_service_with_a_secret_answers_who_has_it_and_nobody_else() -> None:
    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        client = await connect(port, secret=SECRET)
        assert (await client.call("infer", request("b"), timeout_s=LONG_S)).version == "b"
        for wrong in (b"0123456789abcdeg", None):
            with pytest.raises(UnavailableError):
                other = await connect(port, secret=wrong)
                await other.call("infer", request("c"), timeout_s=LONG_S)
        assert handlers.begun == ["b"]
        replayed, kept = (
            await asyncio.open_connection("127.0.0.1", port),
            encode("infer", 1, 1, SERVICE.arguments["infer"](request("d")), Limits()),
        )
        replayed[1].write(kept * 3)
        assert len(await replayed[0].read()) == 32  # a nonce, and then the end
        assert handlers.begun == ["b"]
        await client.close()

    run(test, secret=SECRET)


def test_a_server_without_the_secret_is_not_believed() -> None:
    async def main() -> None:
        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"n" * 32)
            await reader.readexactly(64)
            writer.write(b"c" * 32)

        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        with pytest.raises(UnavailableError, match="is a server without the secret"):
            await connect(server.sockets[0].getsockname()[1], secret=SECRET)
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b"\0", struct.pack("!i", 100), struct.pack("!i", 100) + b"x" * 50])
def test_half_a_frame_keeps_no_connection(sent: bytes) -> None:
    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()
        client = await connect(port)
        await asyncio.sleep(0.05)  # nothing of a frame is there: it may wait
        assert (await client.call("health", timeout_s=LONG_S)).ready
        await client.close()

    run(test, frame_timeout_s=0.01)


def test_a_unix_socket_serves_and_goes(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        server = WireServer(SERVICE, {"health": Handlers().health})
        await server.start_unix(path)
        client = connect_to(SERVICE, f"unix:{path}")
        await client.connect()
        assert (await client.call("health", timeout_s=LONG_S)).ready
        await server.drain(0.0)
        assert not path.exists()
        with pytest.raises(UnavailableError, match="nothing answers at unix:"):
            await connect_to(SERVICE, f"unix:{path}").connect()

    asyncio.run(main())


def test_a_client_that_does_not_read_is_not_written_to_for_ever() -> None:
    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        large = encode("infer", 1, 1, SERVICE.arguments["infer"](request("big", b"\0" * 2**23)), Limits())
        with pytest.raises(ConnectionError):
            while True:
                writer.write(large)
                await writer.drain()

    run(test)


def test_a_service_that_does_not_read_is_not_written_to_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.wire.client._MOST_UNSENT_BYTES", 2**20)

    async def main() -> None:
        def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            hung.append(writer)

        hung: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(deaf, "127.0.0.1", 0)
        client = await connect(server.sockets[0].getsockname()[1])
        large = request("big", b"\0" * 2**23)
        calls = [asyncio.create_task(client.call("infer", large, timeout_s=LONG_S)) for _ in range(8)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(OverloadError, match="does not read what it is sent"):
            done.pop().result()
        client.post("cancel", "big")  # it raised instead of the cancellation that it tells of
        await client.close()
        await asyncio.gather(*calls, return_exceptions=True)
        for each in hung:
            each.close()
        server.close()

    asyncio.run(main())


def test_between_machines_a_service_asks_for_a_secret(tmp_path: Path) -> None:
    from services.listening import listen
    from services.process import ProcessSettings

    async def main(**settings: Any) -> None:
        server, _ = await listen(SERVICE, {}, ProcessSettings(**settings))
        await server.drain(0.0)

    short, long = tmp_path / "short", tmp_path / "long"
    short.write_text("x", encoding="utf-8")
    long.write_text(SECRET.decode() + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"without a secret .* 0\.0\.0\.0 is open to others"):
        asyncio.run(main(host="0.0.0.0"))
    with pytest.raises(ConfigError, match="is too short"):
        asyncio.run(main(host="0.0.0.0", secret_file=short))
    with pytest.raises(ConfigError, match="cannot read the secret"):
        asyncio.run(main(secret_file=tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot use certificate"):
        asyncio.run(main(certificate=long))
    asyncio.run(main(host="0.0.0.0", secret_file=long))
    asyncio.run(main())
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the port of another program
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*; choose another port"):
            asyncio.run(main(port=port))


def test_tls_between_machines(tmp_path: Path) -> None:
    certificate, key = certify(tmp_path)

    async def test(server: WireServer, handlers: Handlers, port: int) -> None:
        client = await connect(port, secret=SECRET, tls=client_tls(certificate))
        assert (await client.call("health", timeout_s=LONG_S)).ready
        await client.close()
        stranger = WireClient(SERVICE, "127.0.0.1", port, secret=SECRET)
        with pytest.raises(UnavailableError):
            await stranger.connect(timeout_s=0.2)
        stranger = WireClient(SERVICE, "127.0.0.1", port, secret=SECRET, tls=client_tls(other))
        with pytest.raises(UnavailableError, match=r"TLS with 127\.0\.0\.1:\d+ failed \(self.signed"):
            await stranger.connect(timeout_s=LONG_S)

    (tmp_path / "other").mkdir()
    other, _ = certify(tmp_path / "other")
    run(test, secret=SECRET, tls=server_tls(certificate, key))


@given(st.lists(st.text(max_size=20), max_size=6))
def test_texts_come_back_as_they_were(texts: list[str]) -> None:
    tensor = text_tensor(texts)
    assert texts_of(tensor) == texts
    tensor.shape = [len(texts), 1]
    assert texts_of(tensor) == texts


@given(st.binary(max_size=40), st.lists(st.integers(0, 9), max_size=3))
def test_other_bytes_are_texts_or_refused(data: bytes, shape: list[int]) -> None:
    try:
        found = texts_of(Tensor("BYTES", shape, data))
    except RequestError as error:
        assert "\n" not in str(error)
    else:
        assert text_tensor(found).data == data and len(found) == shape[0]


def test_half_a_surrogate_pair_cannot_be_encoded() -> None:
    with pytest.raises(RequestError, match="cannot be encoded"):
        encode("load", 1, 1, VersionSource("\ud800"), Limits())
