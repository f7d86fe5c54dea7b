"""Webhooks against a real server: in order, with retries, and never blocking the caller."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gati.errors import VideoError
from gati.video import Reconnect, WebhookSink
from tests.environment import without_proxies
from tests.video.answers import answer, frame
from tests.waiting import LONG_S, returns, until

QUICK = Reconnect(first_s=0.001, cap_s=0.002)
# for hooks that answer: on a slow machine no answer comes too late, and all are sent before the end
PATIENT: dict[str, Any] = {"timeout_s": LONG_S, "farewell_s": LONG_S}


@pytest.fixture(autouse=True)
def unproxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxies and certificates of the environment are none of the tests'."""
    without_proxies(monkeypatch)


class Hook(ThreadingHTTPServer):
    """Answers each request with the next of `statuses` (then 200), once `open` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.statuses: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.asked: list[tuple[str, dict[str, str], int]] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hooks/secret-path?token=hush"

    @property
    def numbers(self) -> list[int]:
        return [number for _, _, number in self.asked]


class _Answer(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, dict(self.headers), body["frame_index"]))
        self.server.open.wait()
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.send_response(status)
        if status in (301, 302):
            self.send_header("location", "http://127.0.0.1:1/elsewhere")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        yield server
        server.open.set()
        server.shutdown()


def test_results_arrive_in_order_as_json(hook: Hook) -> None:
    with WebhookSink(hook.url, headers={"Authorization": "Bearer mine"}, **PATIENT) as sink:
        for number in range(20):
            sink.write(answer(number), frame(number))
    assert hook.numbers == list(range(20))
    path, headers, _ = hook.asked[0]
    assert path == "/hooks/secret-path?token=hush"
    sent = {name.lower(): value for name, value in headers.items()}
    assert (sent["content-type"], sent["authorization"]) == ("application/json", "Bearer mine")
    assert sink.statistics.sent == 20
    assert (sink.statistics.waiting, sink.statistics.dropped, sink.statistics.failed) == (0, 0, 0)


def test_a_slow_hook_costs_old_results_but_never_the_caller(hook: Hook) -> None:
    hook.open.clear()
    sink = WebhookSink(hook.url, queue_size=3, **PATIENT)
    sink.write(answer(0), frame(0))
    until(lambda: hook.numbers == [0])

    def write() -> None:
        for number in range(1, 101):
            sink.write(answer(number), frame(number))

    returns(write)  # though the hook has answered nothing
    assert (sink.statistics.dropped, sink.statistics.waiting) == (97, 4)
    hook.open.set()
    until(lambda: sink.statistics.waiting == 0)
    sink.close()
    assert hook.numbers == [0, 98, 99, 100], "the newest are kept"
    assert sink.statistics.sent == 4


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_tried_again(hook: Hook, status: int) -> None:
    hook.statuses = [status, status]
    with WebhookSink(hook.url, retry=QUICK, **PATIENT) as sink:
        sink.write(answer(0), frame(0))
        sink.write(answer(1), frame(1))
    assert hook.numbers == [0, 0, 0, 1]
    assert (sink.statistics.sent, sink.statistics.failed) == (2, 0)
    assert sink.statistics.last_error.endswith(f": status {status}")


@pytest.mark.parametrize("status", [302, 400, 401, 404])
def test_what_will_not_pass_is_not_tried_again(hook: Hook, status: int) -> None:
    hook.statuses = [status]
    with WebhookSink(hook.url, retry=QUICK, **PATIENT) as sink:
        sink.write(answer(0), frame(0))
        sink.write(answer(1), frame(1))
    assert hook.numbers == [0, 1]
    assert (sink.statistics.sent, sink.statistics.failed) == (1, 1)


def test_tries_end_and_waits_between_them_grow(hook: Hook) -> None:
    hook.statuses = [500] * 4
    slept: list[float] = []
    rule = Reconnect(first_s=1.0, cap_s=2.0, jitter=0.0)
    with WebhookSink(hook.url, retry=rule, attempts=4, sleep=slept.append, **PATIENT) as sink:
        sink.write(answer(0), frame(0))
        sink.write(answer(1), frame(1))
        until(lambda: sink.statistics.sent == 1)
    assert hook.numbers == [0, 0, 0, 0, 1]
    assert slept == [1.0, 2.0, 2.0]
    assert sink.statistics.failed == 1


def test_closing_gives_up_on_a_hook_that_hangs(hook: Hook) -> None:
    hook.open.clear()
    sink = WebhookSink(hook.url, farewell_s=0.1, timeout_s=LONG_S)
    for number in range(4):
        sink.write(answer(number), frame(number))
    until(lambda: hook.numbers == [0])
    began_s = time.monotonic()
    returns(sink.close, LONG_S / 2)  # the hook hangs still
    assert time.monotonic() - began_s >= 0.1
    assert (sink.statistics.dropped, sink.statistics.waiting) == (3, 1)
    with pytest.raises(VideoError, match="was closed; it accepts no more results"):
        sink.write(answer(5), frame(5))


def test_closing_ends_the_wait_for_another_try() -> None:
    rule = Reconnect(first_s=60.0, cap_s=60.0, jitter=0.0)
    sink = WebhookSink("http://127.0.0.1:1/x", retry=rule, farewell_s=0.2)
    sink.write(answer(0), frame(0))
    until(lambda: "ConnectError" in sink.statistics.last_error)
    sink.close()
    until(lambda: sink.statistics.failed == 1, 50.0)  # the wait is for 60


def everything_shown(sink: WebhookSink) -> str:
    return f"{sink!r} {sink.name} {sink.statistics}"


def test_the_path_is_a_secret_also_in_logs(hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    import httpx

    url = hook.url.replace("http://", "http://me:password@")
    with caplog.at_level(logging.DEBUG), WebhookSink(url, retry=QUICK, **PATIENT) as sink:
        hook.statuses = [500, 400]
        sink.write(answer(0), frame(0))
        until(lambda: sink.statistics.failed == 1)
        httpx.get(f"http://127.0.0.1:{hook.server_port}/other", timeout=LONG_S)
    shown = everything_shown(sink) + caplog.text
    assert f"127.0.0.1:{hook.server_port}: status 400" in shown
    assert "/other" in caplog.text, "what others ask is logged as ever"
    for secret in ("secret-path", "hush", "password"):
        assert secret not in shown
    assert not logging.getLogger("httpx").filters


@pytest.mark.parametrize(
    "url", ["", "hush", "ftp://host/hush", "http:///hush", "http://[hush/", "http://h:hush/"]
)
def test_what_is_no_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(VideoError, match="is not an http:// or https:// URL with a host") as caught:
        WebhookSink(url)
    assert "hush" not in str(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "gopher://127.0.0.1:1"),
        ("HTTP_PROXY", "http://proxy:80a"),
        ("SSL_CERT_FILE", __file__),  # where there is none
    ],
)
def test_what_the_environment_names_in_vain_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    told = "with the proxy or the certificates that the environment names"
    with pytest.raises(VideoError, match=told) as caught:
        WebhookSink("https://127.0.0.1:1/hush")
    assert "\n" not in str(caught.value) and "hush" not in str(caught.value)


def test_headers_that_cannot_be_sent_are_not_blamed_on_the_environment() -> None:
    with pytest.raises(VideoError, match="^these headers cannot be sent: ") as caught:
        WebhookSink("http://127.0.0.1:1/", headers={"Authorization": "Bearer schlüssel"})
    assert "\n" not in str(caught.value) and "ssel" not in str(caught.value)


def test_a_queue_of_none_is_refused() -> None:
    with pytest.raises(VideoError, match="queue_size=0 and attempts=5: give 1 or more"):
        WebhookSink("http://127.0.0.1:1/", queue_size=0)


def test_a_sink_that_was_never_used_closes_at_once(hook: Hook) -> None:
    closing: Callable[[], None] = WebhookSink(hook.url).close
    closing()
    assert hook.numbers == []
