"""Malformed requests and frames, and the allowed reactions of a server.

Each case is a valid message, bent by chance, or bytes that never were one; the same seed makes the same case.
`python -m benchmarks.fuzz` sends 10,000 of each kind, `test_fuzz` some hundred.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import select
import socket
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thrift.Thrift import TMessageType

from services.wire.codec import Limits, Service
from services.wire.gen import Inference
from services.wire.gen.ttypes import InferRequest, Tensor, VersionSource
from tests.services.frames import encode
from tests.services.running import png, request

__all__ = ["frame_case", "fuzz_frames", "fuzz_http", "http_case"]

PATIENT_S = 0.03  # for an answer, before the client goes: what is not whole gets none
SILENT_S = 120.0  # a server that does neither answer nor hang up for so long, hangs
MAY_FAIL = (503, 504)
SERVICE = Service(Inference)
_STATUS = re.compile(rb"HTTP/1\.1 ([2-5]\d{2}) ")


def fuzz_http(place: tuple[str, int], cases: int, seed: int = 0) -> Counter[int]:
    """Send so many requests, each on a connection of its own; the statuses that came back, 0 for none.

    **Raises:** `AssertionError` for a status that blames the server, or a connection that hangs.
    """
    statuses: Counter[int] = Counter()
    for number in range(seed, seed + cases):
        reply = _exchange(lambda: socket.create_connection(place), http_case(number), f"HTTP case {number}")
        found = [int(status) for status in _STATUS.findall(reply)]
        blamed = [status for status in found if status >= 500 and status not in MAY_FAIL]
        assert not blamed, f"case {number}: {reply[:500]!r}"
        statuses.update(found or [0])
    return statuses


def fuzz_frames(path: Path, cases: int, seed: int = 0) -> Counter[str]:
    """Send so many messages to a service at a Unix socket; what became of them, by the call's name.

    **Raises:** `AssertionError` for a reply that is no message, or a connection that hangs.
    """

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return connection

    outcomes: Counter[str] = Counter()
    for number in range(seed, seed + cases):
        reply = _exchange(connect, frame_case(number), f"frame {number}")
        outcomes.update(_messages(reply) or ["hung up"])
    return outcomes


def http_case(seed: int) -> bytes:
    """A request, or several, or what is none."""
    dice = random.Random(seed)
    if dice.random() < 0.1:
        return dice.randbytes(dice.choice((0, 1, 20, 300, 5000)))
    body, kind = dice.choice(_BODIES)(dice)
    if dice.random() < 0.3:
        body = _bent(dice, body)
    headers = {"Host": "localhost", "Content-Type": kind, "Content-Length": str(len(body))}
    for _ in range(dice.choice((0, 0, 0, 1, 1, 2))):
        name, values = dice.choice(_HEADERS)
        headers[name] = dice.choice(values)
    if headers.get("Content-Encoding") == "gzip" and dice.random() < 0.5:
        body = gzip.compress(body)
        headers["Content-Length"] = str(len(body))
    if dice.random() < 0.1:
        headers.pop(dice.choice(list(headers)))
    head = f"{dice.choice(_METHODS)} {dice.choice(_PATHS)} {dice.choice(_PROTOCOLS)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    message = head.encode("latin-1") + b"\r\n" + body
    if dice.random() < 0.2:
        message = _bent(dice, message)
    return message * dice.choice((1, 1, 1, 1, 2, 5))


def frame_case(seed: int) -> bytes:
    """A call in its frame, or what is none."""
    dice = random.Random(seed)
    if dice.random() < 0.1:
        return dice.randbytes(dice.choice((0, 1, 3, 4, 50, 5000)))
    name, argument = dice.choice(_CALLS)(dice)
    arguments = [] if argument is None else [argument]
    kind = dice.choice((TMessageType.CALL,) * 6 + (TMessageType.ONEWAY, TMessageType.REPLY, 9))
    message = encode(
        name, kind, dice.choice((0, 1, 2**31 - 1)), SERVICE.arguments[name](*arguments), Limits()
    )
    if dice.random() < 0.4:  # with the length that it then has
        payload = _bent(dice, message[4:])
        message = struct.pack("!i", len(payload)) + payload
    if dice.random() < 0.1:
        message = _bent(dice, message)
    if dice.random() < 0.1:
        message = struct.pack("!i", dice.choice((0, -1, 2**31 - 1, 2**26, 2**26 + 1))) + message[4:]
    return message * dice.choice((1, 1, 1, 3))


# --------------------------------------------------------------------------------------------------------

_METHODS = ("POST",) * 20 + ("GET", "PUT", "HEAD", "OPTIONS", "DELETE", "post", "P\x00ST", "")
_PATHS = (
    *("/v2/models/small/infer",) * 10,
    *("/v1/pipelines/sides/query",) * 6,
    "/v2/models/small/versions/default/infer",
    "/v1/pipelines/sides/query?latency_slo_ms=50",
    "/v2/repository/index",
    "/v2/models/small",
    "/v2/models/%00/infer",
    "/v2/models/../small/infer",
    "//v2/health/ready",
    "/metrics",
    "*",
    "http://[/",
    "/" + "a" * 3000,
)
_PROTOCOLS = ("HTTP/1.1",) * 20 + ("HTTP/1.0", "HTTP/2.0", "HTTP/9", "")
_HEADERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Content-Length", ("-1", "0", "1", "99999999999999999999", "10", "1e3", "")),
    ("Transfer-Encoding", ("chunked", "gzip, chunked", "identity")),
    ("Content-Encoding", ("gzip", "deflate", "br", "")),
    ("Inference-Header-Content-Length", ("0", "5", "-1", "9" * 40, "\xb2")),
    ("Content-Type", ("application/json", "multipart/form-data; boundary=b", "image/png", "\x80")),
    ("Expect", ("100-continue", "200-ok")),
    ("Connection", ("close", "upgrade", "keep-alive")),
    ("Upgrade", ("websocket", "h2c")),
    ("Origin", ("https://elsewhere.example", "null", "http://[")),
    ("Host", ("elsewhere.example", "", "localhost:99999", "[")),
    ("traceparent", ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "00", "\xff" * 60)),
    ("X-API-Key", ("", "x" * 4000)),
    ("Authorization", ("Basic", "Basic ////", "Bearer x")),
)


def _json_body(dice: random.Random) -> bytes:
    document: Any = request(dice.choice((1, 2)))
    tensor, parameters = document["inputs"][0], document["parameters"]
    for _ in range(dice.choice((0, 1, 2))):
        holder = dice.choice((document, tensor, parameters))
        name = dice.choice(("inputs", "outputs", "parameters", "name", "shape", "datatype", "data", "id",
                            "latency_slo_ms", "timeout_ms", "priority", "timeout"))  # fmt: skip
        holder[name] = dice.choice(_VALUES)
    return json.dumps(document).encode()


_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1e308, 10**30, "", "x" * 300, "FP32", "UINT8", "BYTES", "\ud800", "1" * 5000,
    [], [[]], [0] * 50, [10**30], [-1, 6, 6, 1], [2**31, 2**31], [1] * 400, ["a"], [None], {}, {"a": {}},
    [{"name": "exit"}], [{"name": "probabilities", "parameters": {"binary_data": True}}], float("nan"),
)  # fmt: skip


def _binary_body(dice: random.Random) -> bytes:
    count = dice.choice((0, 1, 36, 37, 5000))
    size = dice.choice((count, count, -1, 10**30, "1"))
    tensor = {"name": "input", "shape": [1, 6, 6, 1], "datatype": "UINT8"}
    text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": size}}]}).encode()
    return text + dice.randbytes(count)


def _form_body(dice: random.Random) -> bytes:
    name = dice.choice(("image", "other", "latency_slo_ms", '"', "x" * 500))
    part = f'--b\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'.encode()
    return part + dice.choice((png(), b"", b"x" * 500)) + dice.choice((b"\r\n--b--\r\n", b"\r\n--b", b""))


_BODIES: tuple[Callable[[random.Random], tuple[bytes, str]], ...] = (
    lambda dice: (_json_body(dice), "application/json"),
    lambda dice: (_json_body(dice), "application/json"),
    lambda dice: (_binary_body(dice), "application/octet-stream"),
    lambda dice: (_form_body(dice), "multipart/form-data; boundary=b"),
    lambda dice: (png(), "image/png"),
    lambda dice: (b"[" * dice.choice((10, 1000, 40_000)), "application/json"),
    lambda dice: (b'{"inputs":' * 300, "application/json"),
)


def _infer_call(dice: random.Random) -> tuple[str, Any]:
    shape = dice.choice((*([1, 6, 6, 1],) * 9, [], [0], [1] * 9, [2**40, 2**40], [-1, 36]))
    data = dice.randbytes(dice.choice((36,) * 9 + (0, 1, 144)))
    tensor = Tensor(dice.choice(("UINT8",) * 5 + ("FP32", "INT64", "", "x" * 1000)), shape, data)
    remaining = dice.choice((1000, 1000, 1000, 0, -1, 2**31 - 1))
    return "infer", InferRequest(
        dice.choice(("a", "", "b" * 1000)), tensor, remaining, "0" * 32, dice.choice((1, -5, 2**31 - 1)),
        dice.choice((None, None, None, 50.0, -1.0, float("nan"), float("inf"))),
        dice.choice((None, None, "default", "../x")),
    )  # fmt: skip


_CALLS: tuple[Callable[[random.Random], tuple[str, Any]], ...] = (
    _infer_call,
    _infer_call,
    lambda dice: ("cancel", dice.choice(("a", "", "x" * 5000))),
    lambda dice: ("health", None),
    lambda dice: ("describe", None),
    lambda dice: ("statistics", None),
    lambda dice: ("load", VersionSource("v", dice.choice(("none", "../x", "")), dice.choice((None, "/etc")))),
    lambda dice: ("activate", dice.choice(("none", "", "x" * 5000))),
    lambda dice: ("unload", dice.choice(("none", ""))),
)


def _bent(dice: random.Random, data: bytes) -> bytes:
    """Some of it changed, left out, said twice, or put in."""
    bent = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 5, 30))):
        start = dice.randint(0, len(bent))
        end = min(len(bent), start + dice.choice((1, 1, 4, 50)))
        deed = dice.randrange(5)
        if deed == 0:
            bent[start:end] = dice.randbytes(end - start)
        elif deed == 1:
            del bent[start:end]
        elif deed == 2:
            bent[start:start] = bent[start:end]
        elif deed == 3:
            bent[start:start] = dice.choice(
                (b"\x00", b"\xff" * 4, b"\r\n", b"\r\n\r\n", b"9" * 30, b"\x7f\xff")
            )
        else:
            del bent[dice.randint(0, len(bent)) :]
    return bytes(bent)


def _exchange(connect: Callable[[], socket.socket], data: bytes, what: str) -> bytes:
    """Send all of it, and take what comes until the server hangs up."""
    with connect() as connection:
        connection.settimeout(SILENT_S)
        found = bytearray()
        try:
            connection.sendall(data)
            select.select([connection], [], [], PATIENT_S)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65_536):
                found += part
        except TimeoutError:
            raise AssertionError(f"{what} hangs") from None
        except OSError:  # it hung up, which is an answer
            return bytes(found)
    return bytes(found)


def _messages(reply: bytes) -> list[str]:
    """The names of the calls that were answered, and how. Raises what does not decode."""
    found = []
    while reply:
        (length,) = struct.unpack("!i", reply[:4])
        message = SERVICE.decode(reply[4 : 4 + length], Limits())
        kind = {TMessageType.REPLY: "answered", TMessageType.EXCEPTION: "not a call"}[message.kind]
        refused = getattr(message.body, "error", None) is not None
        name = message.name if message.name in SERVICE.arguments else "another"
        found.append(f"{name} {'refused' if refused else kind}")
        reply = reply[4 + length :]
    return found
