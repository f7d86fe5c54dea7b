"""`ContinuationClient`: whatever answers it, an engine gets a probability or one of Gati's errors."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from gati.errors import EvictError, RequestError, UnavailableError
from gati.evict import ContinuationClient
from tests.environment import without_proxies
from tests.waiting import LONG_S

BYE = [{"role": "user", "content": "Thanks, bye!"}]


@pytest.fixture(autouse=True)
def unproxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxies and certificates of the environment are none of the tests'."""
    without_proxies(monkeypatch)


def client(answer: Callable[[httpx.Request], httpx.Response]) -> ContinuationClient:
    """A client of a service that is a function."""
    found = ContinuationClient("http://service")
    found.close()
    found._client = httpx.Client(base_url="http://service", transport=httpx.MockTransport(answer))
    return found


def test_probabilities_are_those_of_the_service() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        return httpx.Response(200, json={"p": 1 if "messages" in asked else [0.25, 0, 1.0]})

    calls = [*BYE, {"role": "assistant", "content": None, "tool_calls": []}]
    with client(answer) as service:
        assert service.probability(BYE) == 1.0
        assert service.probabilities([BYE, calls, BYE]) == [0.25, 0.0, 1.0]
        assert service.probabilities(iter([BYE, calls, BYE])) == [0.25, 0.0, 1.0]


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param("Thanks, bye!", id="text"),
        pytest.param(BYE[0], id="one message"),
        pytest.param([{"role": "user", "content": b"bye"}], id="bytes"),
        pytest.param([{"role": "user", "content": "half an emoji: \ud83d"}], id="no UTF-8"),
        pytest.param([{"role": "user", "content": float("nan")}], id="no JSON number"),
    ],
)
def test_messages_that_cannot_be_sent_are_not_blamed_on_the_service(messages: Any) -> None:
    with client(lambda request: httpx.Response(200, json={"p": 0.5})) as service:
        for ask in (lambda: service.probability(messages), lambda: service.probabilities([messages])):
            with pytest.raises(RequestError, match='a list of \\{"role": ') as caught:
                ask()
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


GARBAGE = [
    pytest.param(b"", id="nothing"),
    pytest.param(b"<html>", id="no JSON"),
    pytest.param(b"\xff", id="no text"),
    pytest.param(b"[" * 100_000, id="deep"),
    pytest.param(b"[0.5]", id="no object"),
    pytest.param(b"0.5", id="a number"),
    pytest.param(b"{}", id="no p"),
    *(
        pytest.param(b'{"p": %s}' % p, id=p.decode())
        for p in (b"null", b'"0.5"', b"true", b"NaN", b"-0.1", b"1e999", b"1" + 400 * b"0", b"{}", b"[[0.5]]")
    ),
]


@pytest.mark.parametrize("status", [200, 204, 302])
@pytest.mark.parametrize("body", GARBAGE)
def test_an_answer_that_is_none_is_a_service_that_is_not_there(body: bytes, status: int) -> None:
    with client(lambda request: httpx.Response(status, content=body)) as service:
        for ask in (lambda: service.probability(BYE), lambda: service.probabilities([BYE])):
            with pytest.raises(UnavailableError) as caught:
                ask()
            assert "http://service" in str(caught.value) or "(status 302)" in str(caught.value)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("p", [[], [0.5], [0.5, 0.5, 0.5], 0.5])
def test_there_is_one_probability_per_conversation(p: Any) -> None:
    with (
        client(lambda request: httpx.Response(200, json={"p": p})) as service,
        pytest.raises(UnavailableError, match="instead of a probability per conversation"),
    ):
        service.probabilities([BYE, BYE])


@pytest.mark.parametrize(
    ("status", "body", "error", "says"),
    [
        (422, b'{"error": "no message of a user"}', RequestError, r"^no message of a user \(status 422\)$"),
        (404, b'{"detail": "Not Found"}', RequestError, r"^Not Found \(status 404\)$"),
        (400, b'{"error": ["no", "text"]}', RequestError, r"^Bad Request \(status 400\)$"),
        (404, b"[]", UnavailableError, "is no eviction service"),
        (404, b"<html>", UnavailableError, "no eviction service responds"),
        (500, b'{"error": "internal error"}', UnavailableError, r"^internal error \(status 500\)$"),
        (503, b'{"error": "no model"}', UnavailableError, r"^no model \(status 503\)$"),
    ],
)
def test_refusals_and_failures_are_told_apart(
    status: int, body: bytes, error: type[Exception], says: str
) -> None:
    with (
        client(lambda request: httpx.Response(status, content=body)) as service,
        pytest.raises(error, match=says),
    ):
        service.probability(BYE)


@pytest.mark.parametrize(
    ("header", "pause_s"),
    [
        ("7", 7.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 1.0),
        ("-5", 1.0),
        ("nan", 1.0),
        ("9" * 400, 3600.0),
    ],
)
def test_any_time_for_a_retry_is_a_number_of_seconds(header: str, pause_s: float) -> None:
    def busy(request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json={"error": "busy"}, headers={"Retry-After": header})

    with client(busy) as service, pytest.raises(UnavailableError, match="busy") as caught:
        service.probability(BYE)
    assert caught.value.retry_after_s == pause_s


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment with a SOCKS proxy, and without the package that httpx needs for one."""
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "socksio", None)
    return monkeypatch


class Likely(BaseHTTPRequestHandler):
    """Answers that any conversation continues."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"p": 0.75}')

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Say nothing."""


def test_a_service_of_this_machine_is_asked_without_a_proxy(proxied: pytest.MonkeyPatch) -> None:
    proxied.setenv("SSL_CERT_FILE", "/nowhere")  # it needs no certificates, either
    with HTTPServer(("127.0.0.1", 0), Likely) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for host in ("127.0.0.1", "localhost"):
                with ContinuationClient(f"http://{host}:{server.server_port}", timeout_s=LONG_S) as service:
                    assert service.probability(BYE) == 0.75
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("name", "value", "url", "says"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9", "http://service", "SOCKS proxy.* httpx\\[socks\\]"),
        ("ALL_PROXY", "gopher://127.0.0.1:9", "http://service", "scheme"),
        ("SSL_CERT_FILE", __file__, "https://service", "X509"),  # where there is no certificate
        ("SSL_CERT_FILE", __file__, "https://localhost", "X509"),
        ("SSL_CERT_DIR", "", "http://[::1", "Invalid port"),
    ],
)
def test_what_the_environment_or_the_address_makes_impossible_is_told_at_once(
    proxied: pytest.MonkeyPatch, name: str, value: str, url: str, says: str
) -> None:
    proxied.setenv(name, value)
    with pytest.raises(EvictError, match=f"the eviction service at .* cannot be asked .*{says}") as caught:
        ContinuationClient(url)
    assert str(caught.value).endswith("that ALL_PROXY, HTTP_PROXY, HTTPS_PROXY or SSL_CERT_FILE name")
    assert "\n" not in str(caught.value)
