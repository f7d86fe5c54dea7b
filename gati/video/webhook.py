"""Posts answers to a URL without ever blocking the stream."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from gati.errors import VideoError, first_line
from gati.video.frames import Frame
from gati.video.policies import Reconnect
from gati.video.sinks import Result

if TYPE_CHECKING:
    import httpx

_ANSWER_BYTES = 65_536
_log = logging.getLogger(__name__)
_AGAIN = (408, 425, 429)  # retried, as are all statuses from 500


@dataclass(frozen=True)
class WebhookStatistics:
    """Counts of results: `sent`, `waiting`, `dropped` from a full queue, `failed` for good.

    `last_error` is the reason of the last failed attempt, without the address; empty if none failed.
    """

    sent: int
    waiting: int
    dropped: int
    failed: int
    last_error: str


class WebhookSink:
    """Posts each result as one JSON object, in order, from a separate thread.

    At most `queue_size` results wait; when full, the oldest is dropped and counted. A result is tried up to
    `attempts` times, with the waits of `retry`, if a retry may help: no response, or status 408, 425, 429 or
    5xx. Redirects are not followed. The thread starts with the first result.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        queue_size: int = 256,
        attempts: int = 5,
        retry: Reconnect | None = None,
        timeout_s: float = 5.0,
        farewell_s: float = 5.0,
        sleep: Callable[[float], object] | None = None,
        draw: random.Random | None = None,
    ) -> None:
        self.name = _place(url)
        if queue_size < 1 or attempts < 1:
            raise VideoError(f"webhook with queue_size={queue_size} and attempts={attempts}: give 1 or more")
        self._client = _client(headers, timeout_s)
        self._url = url
        self._limit, self._attempts, self._farewell_s = queue_size, attempts, farewell_s
        self._retry = retry or Reconnect(cap_s=10.0)
        self._draw = draw or random.Random()
        self._hurry = threading.Event()  # set to skip the waits before retries
        self._sleep = self._hurry.wait if sleep is None else sleep
        self._changed = threading.Condition()
        self._queue: deque[Result] = deque()
        self._busy = False
        self._closed = False
        self._sent = self._dropped = self._failed = 0
        self._last_error = ""
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"WebhookSink({self.name!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def statistics(self) -> WebhookStatistics:
        """Counts so far."""
        with self._changed:
            waiting = len(self._queue) + self._busy
            return WebhookStatistics(self._sent, waiting, self._dropped, self._failed, self._last_error)

    def write(self, result: Result, frame: Frame) -> None:
        """Queue a result and return at once; VideoError after `close`."""
        with self._changed:
            if self._closed:
                raise VideoError(f"webhook {self.name} was closed; it accepts no more results")
            if len(self._queue) >= self._limit:
                self._queue.popleft()
                self._dropped += 1
            self._queue.append(result)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="gati-webhook", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Send waiting results for at most `farewell_s`; the rest count as dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            self._client.close()
            return
        self._thread.join(self._farewell_s)
        with self._changed:
            self._dropped += len(self._queue)
            self._queue.clear()
        self._hurry.set()

    def _work(self) -> None:
        with self._client, _unlogged():
            while (result := self._next()) is not None:
                delivered = self._deliver(result.as_json().encode())
                with self._changed:
                    self._busy = False
                    self._sent += delivered
                    self._failed += not delivered
                if not delivered and self._failed == 1:
                    _log.warning("a result was not delivered to webhook %s", self._last_error)

    def _next(self) -> Result | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._busy = bool(self._queue)
            return self._queue.popleft() if self._queue else None

    def _deliver(self, body: bytes) -> bool:
        waits_s = self._retry.waits_s(self._draw)
        for attempt in range(1, self._attempts + 1):
            error, again = self._post(body)
            if not error:
                return True
            with self._changed:
                self._last_error = error
            if not again or attempt == self._attempts or self._hurry.is_set():
                break
            self._sleep(next(waits_s))
        return False

    def _post(self, body: bytes) -> tuple[str, bool]:
        """Send once; return the error, empty on success, and whether to retry."""
        import httpx

        try:
            with self._client.stream("POST", self._url, content=body) as response:
                next(response.iter_raw(_ANSWER_BYTES), None)  # the rest is not read
                status = response.status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # their text may quote the address
            return f"{self.name}: {type(error).__name__}", True
        if response.is_success:
            return "", False
        return f"{self.name}: status {status}", status in _AGAIN or status >= 500


def _place(url: str) -> str:
    """Scheme and host, the only part of an address to show: paths of webhooks are often secret."""
    try:
        parts = urlsplit(url)
        host, port, scheme = parts.hostname, parts.port, parts.scheme
    except ValueError:
        host, port, scheme = None, None, ""
    if scheme not in ("http", "https") or not host:
        raise VideoError("the webhook's address is not an http:// or https:// URL with a host; check it")
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}" + ("" if port is None else f":{port}")


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keep httpx from logging the URLs that this thread requests: they are secret."""
    logger, thread = logging.getLogger("httpx"), threading.get_ident()

    def is_of_another(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_another)
    try:
        yield
    finally:
        logger.removeFilter(is_of_another)


def _client(headers: Mapping[str, str] | None, timeout_s: float) -> httpx.Client:
    try:
        import httpx
    except ImportError:
        raise VideoError('webhooks need the package httpx; run: pip install "gati[stream]"') from None
    try:
        given = httpx.Headers({"content-type": "application/json", **(headers or {})})
    except (TypeError, ValueError) as error:
        raise VideoError(f"these headers cannot be sent: {first_line(error)}") from error
    try:
        return httpx.Client(headers=given, timeout=timeout_s, follow_redirects=False)
    except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:
        raise VideoError(
            "webhooks cannot be posted with the proxy or the certificates that the environment names "
            f"({first_line(error)}); correct ALL_PROXY, HTTP_PROXY, HTTPS_PROXY or SSL_CERT_FILE"
        ) from error
