"""Quotas of clients: requests and bytes per second, and concurrent requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from gati.errors import OverloadError


class _Bucket:
    """A token bucket that gains `rate` tokens per second, up to max(rate, 1). Its level may be negative."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._most = max(1.0, rate)
        self._left = self._most
        self._clock = clock
        self._since_s = clock()

    def wait_s(self) -> float:
        """The time until its level is above zero."""
        now_s = self._clock()
        self._left = min(self._most, self._left + self._rate * (now_s - self._since_s))
        self._since_s = now_s
        return 0.0 if self._left > 0.0 else (1e-3 - self._left) / self._rate

    def take(self, count: float) -> None:
        """Take `count` tokens, even if the level falls below zero."""
        self._left -= count


class Quota:
    """The remaining quota of one key; unlimited until `limit` is called. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limits: tuple[float | None, float | None, int | None] = (None, None, None)
        self._requests: _Bucket | None = None
        self._bytes: _Bucket | None = None
        self._most_in_flight: int | None = None
        self._in_flight = 0

    @property
    def counts_bytes(self) -> bool:
        """Whether bytes are limited, so that `sent` must be called."""
        return self._bytes is not None

    def limit(
        self, requests_a_second: float | None, bytes_a_second: float | None, in_flight: int | None
    ) -> None:
        """Set the limits (None: unlimited). Setting the same ones again changes nothing."""
        limits = (requests_a_second, bytes_a_second, in_flight)
        if limits == self._limits:
            return
        self._limits = limits
        self._requests = None if requests_a_second is None else _Bucket(requests_a_second, self._clock)
        self._bytes = None if bytes_a_second is None else _Bucket(bytes_a_second, self._clock)
        self._most_in_flight = in_flight

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it runs. Raises `OverloadError` if the quota is used up."""
        if self._most_in_flight is not None and self._in_flight >= self._most_in_flight:
            raise OverloadError(f"this key has {self._in_flight} requests in progress", retry_after_s=0.1)
        for bucket, what in ((self._requests, "requests"), (self._bytes, "bytes")):
            wait_s = 0.0 if bucket is None else bucket.wait_s()
            if wait_s > 0.0:
                raise OverloadError(f"this key has used up its {what} per second", retry_after_s=wait_s)
        if self._requests is not None:
            self._requests.take(1.0)
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def sent(self, count: int) -> None:
        """Count bytes of a body. They are accepted beyond the quota, too; later requests are then refused."""
        if self._bytes is not None:
            self._bytes.take(count)


def counted(receive: Receive, quota: Quota) -> Receive:
    """Wrap `receive` to count the bytes of the body in the quota."""

    async def counting() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            quota.sent(len(message.get("body", b"")))
        return message

    return counting
