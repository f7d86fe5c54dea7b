"""The access log: one line per request, without content or keys. It also reports to telemetry."""

from __future__ import annotations

import logging
import random
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Send

from services.http import should_leave
from services.scheduler.admission import MANAGEMENT
from services.scheduler.telemetry import OpenTelemetry
from services.scheduler.timing import trace_id_of
from services.scheduler.tracing import LONGEST_PATH, WATCHED_PATHS, follow, trace_of

_requests = logging.getLogger("gati.access")
_audits = logging.getLogger("gati.audit")

_FOR_OVERLOAD = (429, 503)
_CLOSE = (b"connection", b"close")


class Access:
    """The log entry of one request, from its head to the end of its reply."""

    def __init__(
        self,
        request: Request,
        send: Send,
        share: float,
        telemetry: OpenTelemetry | None = None,
        *,
        leaving: bool = False,
    ) -> None:
        self._request = request
        self._send = send
        self._leaving = leaving  # the server will end: clients should connect to another one
        self._share = share
        self._telemetry = telemetry
        self._began_s = time.monotonic()
        self.status = 0
        self.quiet = False  # no line: a flood of refusals must not fill the log
        self.key = ""  # the name of the client's key
        if telemetry is not None:
            follow(request.scope)

    async def send(self, message: Message) -> None:
        """Pass a message on to the client."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._closes:
                message["headers"] = [*message["headers"], _CLOSE]
        await self._send(message)

    def replies(self, reply: Response) -> None:
        """Like `send`, for a complete reply, before it is sent; both may add `Connection: close`."""
        self.status = reply.status_code
        if self._closes:
            reply.raw_headers.append(_CLOSE)

    def ended(self) -> None:
        """Write the line. Management requests are always logged, to the log `gati.audit`."""
        scope = self._request.scope
        if self._telemetry is not None and (trace := trace_of(scope)) is not None:
            self._telemetry.ended(scope, trace, self._status, time.monotonic() - self._began_s)
        path: str = scope["path"]
        if path.startswith(MANAGEMENT) and self._request.method != "GET":
            _audits.info("management", extra=self._line(path))
            return
        if self.quiet:
            return
        level = logging.DEBUG if path.startswith(WATCHED_PATHS) else logging.INFO
        if _requests.isEnabledFor(level) and (self._share >= 1.0 or random.random() < self._share):
            _requests.log(level, "http", extra=self._line(path))

    @property
    def _closes(self) -> bool:
        return self._leaving or (self.status in _FOR_OVERLOAD and should_leave(self._request.scope))

    @property
    def _status(self) -> int:
        return self.status or 499  # the client disconnected before the reply

    def _line(self, path: str) -> dict[str, Any]:
        client = self._request.scope.get("client")
        return {
            "method": self._request.method,
            "path": path[:LONGEST_PATH],
            "status": self._status,
            "ms": round(1e3 * (time.monotonic() - self._began_s), 2),
            "key": self.key,
            "client": client[0] if client else "",
            "trace_id": self._trace_id(),
        }

    def _trace_id(self) -> str:
        given = self._request.headers.get("traceparent")
        return "" if given is None else trace_id_of(given)
