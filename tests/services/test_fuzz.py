"""What no client should send: schemathesis over the OpenAPI document, and raw bytes over sockets."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.services.running import Serving, make_folder
from tests.waiting import LONG_S

pytestmark = pytest.mark.slow

CAREFUL = settings(
    max_examples=190,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_no_case_of_schemathesis_is_the_servers_fault(tmp_path: Path) -> None:
    with Serving(make_folder(tmp_path) / "serve.toml") as running:
        schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        cases = 0
        for result in schema.get_all_operations():
            operation = result.ok()

            def check(case: schemathesis.Case) -> None:
                nonlocal cases
                cases += 1
                reply = case.call(timeout=LONG_S)
                assert reply.status_code < 500, f"{case.method} {case.path}: {reply.status_code} {reply.text}"

            CAREFUL(given(case=operation.as_strategy())(check))()
        assert cases >= 2000
        running.wait_until_ready()
        assert running.infer().status_code == 200


def raw(seed: int) -> bytes:
    """Bytes that are no request, or half of one."""
    dice = random.Random(seed)
    body = dice.randbytes(dice.randint(0, 200))
    sized = b"Content-Length: %d\r\n" % len(body)
    infer = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: localhost\r\n"
    query = b"POST /v1/pipelines/sides/query HTTP/1.1\r\nHost: localhost\r\n"
    form = b"Content-Type: multipart/form-data; boundary=b\r\n"
    return dice.choice(
        [
            body,
            infer,
            infer + b"Content-Length: 10\r\n\r\nabc",
            infer + b"Content-Length: -1\r\n\r\n",
            infer + b"Content-Length: 99999999999999\r\n\r\n" + body,
            infer + b"Transfer-Encoding: chunked\r\n\r\n" + body,
            infer + sized + b"\r\n" + body,
            infer + sized + b"Inference-Header-Content-Length: %d\r\n\r\n" % 10**30 + body,
            infer + sized + b"Inference-Header-Content-Length: 5\r\n\r\n" + body,
            infer + sized + b"Content-Encoding: gzip\r\n\r\n" + body,
            infer + b"Content-Length: 40000\r\n\r\n" + b"[" * 40_000,
            infer + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
            b"GET /" + body + b" HTTP/1.1\r\n\r\n",
            b"A" * 100_000,
            query + sized + b"\r\n" + body,
            query + sized + form + b"\r\n" + body,
        ]
    )


def test_malformed_bytes_leave_the_server_answering(serving: Serving) -> None:
    address = urlsplit(serving.url)
    for seed in range(600):
        with socket.create_connection((address.hostname, address.port), timeout=LONG_S) as connection:
            try:
                connection.sendall(raw(seed))
                connection.shutdown(socket.SHUT_WR)
                while reply := connection.recv(65_536):
                    assert not reply.startswith(b"HTTP/1.1 5"), reply[:300]
            except ConnectionError:
                continue  # it hung up, which is an answer
        if seed % 100 == 0:
            assert serving.infer().status_code == 200
    assert serving.infer().status_code == 200
    assert serving.process.poll() is None
