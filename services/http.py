"""HTTP connections within bounds: their number, how long they may stay silent, the size of the headers.

uvicorn's protocol has no bound on heads, on half-sent requests and on clients that do not read. Here a
connection that has sent nothing, half a head, or a body slower than a trickle is closed, and so is one whose
client does not take what it asked for. When there are too many, the one goes that has kept us waiting longest
without a whole request, so that silent ones cannot keep others out. Where none has for long, new ones wait to
be accepted (`places`), and who is refused for overload is asked to come back with another connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_LEAST_BYTES_A_SECOND = 16 * 1024  # of a body, once the first timeout has passed
_MOST_HEADERS = 100
_MOST_PIPELINED = 32
_SILENT_S = 0.5  # a connection idle for less than this is not closed in favour of another
_NEARLY_FULL = 0.9
_CONNECTION, _WAITED_S = "gati.connection", "gati.waited_s"  # in the scope of a request


@dataclass(frozen=True)
class HttpLimits:
    """Bounds on connections. A head is the request line and the headers."""

    connections: int = 1000
    head_bytes: int = 65_536
    head_timeout_s: float = 10.0  # from connecting, or the end of the request before, to the end of the head
    body_timeout_s: float = 30.0  # a body slower than a trickle, or a reply that is not taken


class _Turned:
    """An ASGI application that answers everything in one way, and hangs up."""

    def __init__(self, status: int, message: str) -> None:
        self._status = status
        self._body = b'{"error":"%s"}' % message.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self._body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


class _OpenTransport:
    """A transport that may be written to after it was closed: what is written then is dropped.

    A request may be answered after what followed it ended the connection, and uvloop raises for that.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing  # asked many times in each request

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def http_protocol(limits: HttpLimits) -> type[asyncio.Protocol]:
    """The class of connections that uvicorn is to use, with these limits."""

    class _Bounded(_BoundedProtocol):
        _limits = limits

    return _Bounded


def places(connections: Collection[Any], limits: HttpLimits, now_s: float) -> int:
    """How many more can be accepted; `now_s` is of their event loop."""
    left = limits.connections - len(connections)
    return left if left > 0 else left + sum(_is_silent(each, now_s) for each in connections)


def waited_s(scope: Scope) -> float:
    """For how long a request waited for its connection to be accepted."""
    return float(scope.get(_WAITED_S, 0.0))


def should_leave(scope: Scope) -> bool:
    """Whether the connection of a request, which is here as a whole, had better make room for another."""
    connection = scope.get(_CONNECTION)
    return connection is not None and connection.should_leave


def tell_when_gone(scope: Scope, tell: Callable[[], None]) -> Callable[[], None] | None:
    """Have `tell` called once when the client of a request goes, until what is returned is called.

    None where the server is another one and cannot tell. The body has to have been read.
    """
    connection = scope.get(_CONNECTION)
    return None if connection is None else connection.tell_when_gone(tell)


def _is_silent(connection: Any, now_s: float) -> bool:
    return isinstance(connection, _BoundedProtocol) and connection.silent_s(now_s) > _SILENT_S


class _BoundedProtocol(HttpToolsProtocol):
    """One connection. What uvicorn calls is extended, never replaced."""

    _limits = HttpLimits()
    _TOO_LARGE = _Turned(431, "the head of the request is too large; send less")

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # of the head under way
        self._body_bytes = 0  # of the body under way
        self._body_began_s = 0.0
        self._in_head = self._in_body = False
        self._answered = False  # anything, ever
        self._waits_since_s = self.loop.time()
        self.waited_s = 0.0  # the first request, before the connection was accepted
        self._tell: Callable[[], None] | None = None  # who wants to know when the client goes

    # What uvicorn calls ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        open_transport: Any = _OpenTransport(transport)
        super().connection_made(open_transport)
        if len(self.connections) > self._limits.connections:
            self._make_room()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._cancel_timers()
        super().connection_lost(exc)
        if self._tell is not None:
            self._tell()

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        long_head = not self._in_body and self._head_bytes > self._limits.head_bytes
        if long_head or len(self.pipeline) > _MOST_PIPELINED:
            self._hang_up()
        elif self._timer is None:
            if self._in_body:  # of which not all has come with its head
                self._timer = self.loop.call_later(self._limits.body_timeout_s, self._check_body)
            elif self._idle:  # half a head, or what comes before one
                self._expect_head()

    def on_message_begin(self) -> None:
        """A head has begun."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is there."""
        self._in_head = False
        self._head_bytes = 0
        self._cancel_timer()
        self.scope[_CONNECTION] = self  # type: ignore[literal-required]
        if self.waited_s:
            self.scope[_WAITED_S] = self.waited_s  # type: ignore[literal-required]
            self.waited_s = 0.0
        app, size = self.app, len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value) + 4
        if size > self._limits.head_bytes or len(self.headers) > _MOST_HEADERS:
            self.app = self._TOO_LARGE
        try:
            super().on_headers_complete()
        finally:
            self.app = app
        self._in_body, self._body_bytes, self._body_began_s = True, 0, self.loop.time()

    def on_body(self, body: bytes) -> None:
        """A part of a body is there."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is there."""
        self._in_body = False
        self._head_bytes = 0
        self._cancel_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request is answered."""
        self._answered = True
        self._waits_since_s = self.loop.time()
        super().on_response_complete()
        if self._in_head and self._idle and self._timer is None:  # it came while this was being answered
            self._expect_head()

    def pause_writing(self) -> None:
        """The client does not take what it is sent."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.body_timeout_s, self._hang_up)

    def resume_writing(self) -> None:
        """The client takes it again."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # ----------------------------------------------------------------------------------------------------

    def tell_when_gone(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Of the request that is being answered: there is one at a time."""
        if self.transport.is_closing():
            tell()
        else:
            self._tell = tell
            self.flow.resume_reading()  # or its end would not be seen
        return self._forget_who_asked

    def _forget_who_asked(self) -> None:
        self._tell = None

    @property
    def should_leave(self) -> bool:
        """Whether there are nearly too many connections, and nothing more comes on this one for now."""
        return not self._in_body and len(self.connections) > _NEARLY_FULL * self._limits.connections

    def silent_s(self, now_s: float) -> float:
        """For how long it has kept us waiting for a whole request; less than nothing if it does not."""
        return now_s - self._waits_since_s if self._idle or self._in_body else -1.0

    @property
    def _idle(self) -> bool:
        """Whether no request is there: neither one whose body comes nor one that is being answered."""
        return not self._in_body and (self.cycle is None or self.cycle.response_complete)

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(self._limits.head_timeout_s, self._hang_up)

    def _check_body(self) -> None:
        if self.cycle.response_complete:  # it was refused, and more of it still comes
            self._hang_up()
            return
        late_s = self.loop.time() - self._body_began_s - self._limits.body_timeout_s
        if not self.flow.read_paused and self._body_bytes <= late_s * _LEAST_BYTES_A_SECOND:
            self._hang_up()
        else:
            self._timer = self.loop.call_later(self._limits.body_timeout_s, self._check_body)

    def _make_room(self) -> None:
        """Close the connection idle for longest, preferring those that never sent a request.

        Where none is silent there is one connection too many for a while: what it has sent is not read yet.
        """
        now_s = self.loop.time()
        silent = [
            each
            for each in self.connections
            if isinstance(each, _BoundedProtocol) and each is not self and _is_silent(each, now_s)
        ]
        if silent:
            min(silent, key=lambda each: (each._answered, each._waits_since_s))._hang_up()

    def _hang_up(self) -> None:
        """End the connection now, whatever is on its way."""
        self._cancel_timers()
        self.connections.discard(self)
        if not self.transport.is_closing():
            self.transport.abort()

    def _cancel_timers(self) -> None:
        self._cancel_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
