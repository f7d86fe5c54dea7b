"""Limits for HTTP connections: their number, the size of headers, and the time for each part of a request.

uvicorn's protocol does not limit headers, incomplete requests, or clients that do not read. Here a connection
is closed if its client sends nothing, an incomplete head, long trailers, or a body that is too slow, or does
not read its reply; earlier if replies that are not read take too much memory. If there are too many, the one
that has waited longest for a complete request is closed, so silent clients cannot keep others out. If all are
active, new ones wait to be accepted (`places`), and those whose request is refused for overload are closed
after the reply (`should_leave`). With TLS, the limits do not apply to the last reply: uvloop does not tell.

Requests to switch to another protocol, as Java's HTTP client makes for HTTP/2, are answered in HTTP/1.1.
uvicorn's parser would skip their body and take it for the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeGuard

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_LEAST_BYTES_A_SECOND = 16 * 1024  # of a body, after the first `body_timeout_s`
_READ_FIRST_BYTES = 2**20  # assumed to be read of each reply in the first second
_MOST_HEADERS = 100
_MOST_PIPELINED = 32
_SILENT_S = 0.5  # a connection idle for less than this is not closed to make room
_NEARLY_FULL = 0.9  # share of the limit on connections
_OF_SWITCH = (b"upgrade", b"http2-settings")  # headers, and words of the header `Connection`
_CONNECTION, _WAITED_S = "gati.connection", "gati.waited_s"  # keys in the scope of a request


@dataclass(frozen=True)
class HttpLimits:
    """Limits for connections. A head is the request line and the headers."""

    connections: int = 1000
    head_bytes: int = 65_536
    head_timeout_s: float = 10.0  # to complete a head, from connecting or from its first bytes
    body_timeout_s: float = 30.0  # until a body must be fast enough, or a reply must have been read
    unread_bytes: int = 448 * 2**20  # of all replies that wait to be read


class _Refusal:
    """An ASGI application that answers every request with the same error and closes the connection."""

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
    """A transport that may be written to after it was closed; that data is dropped.

    uvloop raises in that case. It happens when later data of the client, such as an oversized head, ended the
    connection while a request was still being answered. `lingers` returns whether to close it later.
    """

    def __init__(self, transport: asyncio.Transport, lingers: Callable[[], bool]) -> None:
        self._transport, self._lingers = transport, lingers
        self.is_closing = transport.is_closing  # an attribute, because it is called many times per request

    def close(self) -> None:
        if not self._lingers():
            self._transport.close()

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Parser:
    """The parser of a connection, which ignores that a client wants to switch to another protocol.

    The original parser stops after the head of such a request. So the head is parsed again without that wish,
    and then what follows it.
    """

    def __init__(self, protocol: _BoundedProtocol) -> None:
        self._protocol = protocol
        self._begin()

    def feed_data(self, data: bytes) -> None:
        """Parse some bytes. Raises `HttpParserError`."""
        rest: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                if self.get_method() == b"CONNECT":
                    raise httptools.HttpParserInvalidMethodError("CONNECT is not served") from stop
                rest = memoryview(rest)[stop.args[0] :]
            head = self._plain_head()
            self._begin()  # the old one would ignore what follows a head with `Connection: close`
            self._parser.feed_data(head)

    def _begin(self) -> None:
        parser = self._parser = httptools.HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.get_method, self.get_http_version = parser.get_method, parser.get_http_version
        self.should_upgrade, self.should_keep_alive = parser.should_upgrade, parser.should_keep_alive

    def _plain_head(self) -> bytes:
        """The head that was just parsed, without the headers of the switch."""
        method, version = self.get_method(), self.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self._protocol.url, version)]
        for name, value in self._protocol.headers:
            if name == b"connection":
                words = (word.strip() for word in value.split(b","))
                value = b", ".join(word for word in words if word.lower() not in _OF_SWITCH)
            if name not in _OF_SWITCH:
                lines.append(name + b": " + value)
        return b"\r\n".join((*lines, b"", b""))


def http_protocol(limits: HttpLimits) -> type[asyncio.Protocol]:
    """The protocol class for uvicorn, with these limits."""

    class _Bounded(_BoundedProtocol):
        _limits = limits
        _unread = {}

    return _Bounded


def places(connections: Collection[Any], limits: HttpLimits, now_s: float) -> int:
    """How many more connections can be accepted, some of them in place of silent ones.

    `now_s` is the time of their event loop.
    """
    left = limits.connections - len(connections)
    return left if left > 0 else left + sum(_is_silent(each, now_s) for each in connections)


def waited_s(scope: Scope) -> float:
    """How long a request waited for its connection to be accepted."""
    return float(scope.get(_WAITED_S, 0.0))


def should_leave(scope: Scope) -> bool:
    """Whether the connection of a request should be closed after the reply, to make room for others."""
    connection = scope.get(_CONNECTION)
    return connection is not None and connection.should_leave


def tell_when_gone(scope: Scope, tell: Callable[[], None]) -> Callable[[], None]:
    """Call `tell` once if the client of a request disconnects; returns a function that cancels this.

    The body must have been read before. Other servers than this one never call it.
    """
    connection = scope.get(_CONNECTION)
    return (lambda: None) if connection is None else connection.tell_when_gone(tell)


def _is_silent(connection: object, now_s: float) -> TypeGuard[_BoundedProtocol]:
    return isinstance(connection, _BoundedProtocol) and connection.silent_s(now_s) > _SILENT_S


class _BoundedProtocol(HttpToolsProtocol):
    """One connection. It extends the methods that uvicorn calls and always calls the originals."""

    _limits = HttpLimits()
    _unread: dict[_BoundedProtocol, tuple[int, float]] = {}  # bytes that clients did not read, and since when
    _TOO_LARGE = _Refusal(431, "the request line and headers are too large; send less")

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.parser = _Parser(self)  # type: ignore[assignment]
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = self._body_bytes = 0  # received of the current head (or trailers), and body
        self._body_began_s = 0.0
        self._in_head = self._in_body = False
        self._answered = False  # whether any request was answered
        self._lingers = False  # its last reply was sent before the body of that request had arrived
        self._answering: Any = None  # uvicorn's cycle of the request that is being answered, or was last
        self._waits_since_s = self.loop.time()
        self.waited_s = 0.0  # how long data waited before the connection was accepted
        self._tell: Callable[[], None] | None = None  # called when the client disconnects

    # What uvicorn calls ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        open_transport: Any = _OpenTransport(transport, self._begins_to_linger)
        super().connection_made(open_transport)
        if len(self.connections) > self._limits.connections:
            self._make_room()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._cancel_timers()
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True  # uvicorn only tells the last request that it has read
            self._answering.message_event.set()
        if self._tell is not None:
            self._tell()

    def data_received(self, data: bytes) -> None:
        """Some bytes have arrived."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_bytes > self._limits.head_bytes or len(self.pipeline) > _MOST_PIPELINED:
            self._hang_up()
        elif self._timer is None:
            if self._in_body:  # the body did not arrive completely with its head
                self._timer = self.loop.call_later(self._limits.body_timeout_s, self._check_body)
            elif self._idle:  # an incomplete head, or blank lines before one
                self._expect_head()

    def on_message_begin(self) -> None:
        """A head has begun."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is complete."""
        if self.parser.should_upgrade() or self.transport.is_closing():  # it is parsed again, or not served
            return
        self._in_head, self._head_bytes = False, 0
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
        if not self.pipeline:
            self._answering = self.cycle
        self._in_body, self._body_bytes, self._body_began_s = True, 0, self.loop.time()
        self.headers = []  # for trailers: those of the request are in its scope, and nothing may follow them

    def on_body(self, body: bytes) -> None:
        """Part of a body has arrived."""
        self._head_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is complete."""
        if self.parser.should_upgrade():
            return
        self._in_body, self._head_bytes = False, 0
        self._cancel_timer()
        super().on_message_complete()
        if self._lingers:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that are not HTTP; in a body whose request has its reply, only end the connection."""
        if self._in_body and self.cycle.response_started:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        """A request is answered."""
        self._answered = True
        self._waits_since_s = self.loop.time()
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()
        if self._in_head and self._idle and self._timer is None:  # it began to arrive before this reply ended
            self._expect_head()

    def pause_writing(self) -> None:
        """The client does not read what it is sent."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.body_timeout_s, self._hang_up)
            self._unread[self] = self.transport.get_write_buffer_size(), self.loop.time()
            self.loop.call_soon(self._free_memory)  # later: it may close this connection, which is being used

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._cancel_write_timer()

    # ----------------------------------------------------------------------------------------------------

    def tell_when_gone(self, tell: Callable[[], None]) -> Callable[[], None]:
        """As the function of that name; for the one request that is being answered."""
        if self.transport.is_closing():
            tell()
        else:
            self._tell = tell
            self.flow.resume_reading()  # otherwise a disconnect would not be noticed
        return self._stop_telling

    def _stop_telling(self) -> None:
        self._tell = None

    @property
    def should_leave(self) -> bool:
        """Whether the limit on connections is almost reached, and this one has no body to receive."""
        return not self._in_body and len(self.connections) > _NEARLY_FULL * self._limits.connections

    def silent_s(self, now_s: float) -> float:
        """How long this connection has been idle or sending an incomplete request; negative if neither."""
        return now_s - self._waits_since_s if self._idle or self._in_body else -1.0

    @property
    def _idle(self) -> bool:
        """Whether no request is being received (beyond its head) or answered."""
        return not self._in_body and (self.cycle is None or self.cycle.response_complete)

    def _begins_to_linger(self) -> bool:
        """Whether to close the connection only once the body of its last request has arrived.

        The system resets a connection that is closed before all data were read; the client may then lose the
        reply, which says why it was refused. One that waits for "100 Continue" sends no body.
        """
        if self._lingers or not self._in_body or self.cycle.keep_alive or not self.cycle.response_complete:
            return False
        self._lingers = self._body_bytes > 0 or not self.expect_100_continue
        return self._lingers

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(self._limits.head_timeout_s, self._hang_up)

    def _check_body(self) -> None:
        if self.cycle.response_complete:  # it was refused, but its body still arrives
            self._hang_up()
            return
        late_s = self.loop.time() - self._body_began_s - self._limits.body_timeout_s
        if not self.flow.read_paused and self._body_bytes <= late_s * _LEAST_BYTES_A_SECOND:
            self._hang_up()
        else:
            self._timer = self.loop.call_later(self._limits.body_timeout_s, self._check_body)

    def _make_room(self) -> None:
        """Close the connection that has been silent longest, preferring those that never had a reply.

        If none is silent, there is one connection too many for a while.
        """
        now_s = self.loop.time()
        silent = [each for each in self.connections if each is not self and _is_silent(each, now_s)]
        if silent:
            min(silent, key=lambda each: (each._answered, each._waits_since_s))._hang_up()

    def _free_memory(self) -> None:
        """While unread replies take too much memory, close the connection that would take it for longest."""
        left = {each: each.transport.get_write_buffer_size() for each in self._unread}
        excess, now_s = sum(left.values()) - self._limits.unread_bytes, self.loop.time()

        def until_read_s(each: _BoundedProtocol) -> float:  # at its speed so far
            size, since_s = self._unread[each]
            return left[each] * (1.0 + now_s - since_s) / (_READ_FIRST_BYTES + max(0, size - left[each]))

        for each in sorted(left, key=until_read_s, reverse=True) if excess > 0 else ():
            if excess > 0:
                excess -= left[each]
                each._hang_up()

    def _hang_up(self) -> None:
        """End the connection immediately; unsent data are dropped."""
        self._cancel_timers()
        self.connections.discard(self)
        self.transport.abort()  # also if it is closing, which waits until its reply has been read

    def _cancel_timers(self) -> None:
        self._cancel_timer()
        self._cancel_write_timer()

    def _cancel_write_timer(self) -> None:
        self._unread.pop(self, None)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
