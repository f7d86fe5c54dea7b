"""A Thrift server for asyncio, with limits on connections, frames and concurrent calls.

If it requires a secret, clients that have not proven it cannot keep others out: at the limit on connections,
the oldest of them is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from thrift.Thrift import TApplicationException, TMessageType

from gati.errors import GatiError, NotAllowedError, RequestError
from services.accepting import PatientListener
from services.wire.codec import READ_BYTES, Frames, Limits, Message, Service, encode_parts
from services.wire.errors import to_wire
from services.wire.handshake import require

_log = logging.getLogger("gati.wire")

Handler = Callable[..., Awaitable[Any]]

_MOST_UNSENT_BYTES = 64 * 2**20  # buffered for a client that does not read
_MOST_CALLS = 4096  # concurrent ones on one connection; more wait in the socket


class WireServer:
    """Serves one service of the IDL; `handlers` maps the name of each call to a coroutine function.

    If a connection is lost, its calls are cancelled. Invalid messages end their connection.
    """

    def __init__(
        self,
        service: Service,
        handlers: Mapping[str, Handler],
        *,
        limits: Limits | None = None,
        most_connections: int = 256,
        idle_timeout_s: float = 3600.0,
        frame_timeout_s: float = 60.0,
        secret: bytes | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._service = service
        self._handlers = handlers
        self._limits = limits or Limits()
        self._most_connections = most_connections
        self._idle_timeout_s = idle_timeout_s
        self._frame_timeout_s = frame_timeout_s  # from the first byte of a frame to its last
        self._secret = secret  # that every client must have
        self._tls = tls
        self._path: Path | None = None
        self._server: asyncio.Server | PatientListener | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._unproven: dict[asyncio.Task[None], None] = {}  # have not proven the secret; oldest first
        self._calls: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port (a free one if `port` is 0)."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
        self._server = PatientListener(
            listening,
            self._protocol,
            tls=self._tls,
            handshakes=self._most_connections,
            handshake_timeout_s=self._frame_timeout_s,
        )
        return int(listening.getsockname()[1])

    def renew(self, tls: ssl.SSLContext) -> None:
        """Use this context for new connections."""
        if isinstance(self._server, PatientListener):
            self._server.renew(tls)

    async def start_unix(self, path: Path) -> None:
        """Listen on a Unix socket, whose file `drain` removes."""
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(path))
        self._path = path

    async def drain(self, timeout_s: float) -> None:
        """Accept no more connections, wait up to `timeout_s` for running calls, then close everything."""
        if self._server is not None:
            self._server.close()
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_s)
        for task, writer in list(self._connections.items()):
            writer.close()
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=1.0)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _protocol(self, _: float) -> asyncio.BaseProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if len(self._connections) >= self._most_connections:
            self._make_room()
        if task is None or len(self._connections) >= self._most_connections:
            _log.warning("connection refused", extra={"connections": len(self._connections)})
            writer.close()
            return
        self._connections[task] = writer
        calls: set[asyncio.Task[None]] = set()
        try:
            if self._secret is not None:
                self._unproven[task] = None
                async with asyncio.timeout(self._frame_timeout_s):
                    await require(reader, writer, self._secret)
                self._unproven.pop(task)
            await self._read(reader, writer, calls)
        except (RequestError, NotAllowedError) as error:
            _log.warning("connection closed", extra={"reason": str(error)})
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            _log.debug("connection ended")
        except asyncio.CancelledError:
            _log.debug("connection cancelled")
        finally:
            for call in calls:
                call.cancel()
            self._connections.pop(task, None)
            self._unproven.pop(task, None)
            writer.close()

    def _make_room(self) -> None:
        """End the oldest connection that has not proven the secret, if there is one."""
        for task in self._unproven:
            del self._unproven[task]
            self._connections.pop(task).transport.abort()
            task.cancel()
            return

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, calls: set[asyncio.Task[None]]
    ) -> None:
        frames, patience = Frames(self._limits), _Patience(reader, calls)
        try:
            patience.wait(self._idle_timeout_s, unless_busy=True)
            while data := await reader.read(READ_BYTES):
                found = frames.take(data)
                if not frames.partial:
                    patience.wait(self._idle_timeout_s, unless_busy=True)
                elif found or patience.unless_busy:  # another frame has begun
                    patience.wait(self._frame_timeout_s, unless_busy=False)
                for frame in found:
                    message = self._service.decode(frame, self._limits)
                    if len(calls) >= _MOST_CALLS:
                        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                    self._begin(message, writer, calls)
        finally:
            patience.end()

    def _begin(self, message: Message, writer: asyncio.StreamWriter, calls: set[asyncio.Task[None]]) -> None:
        def ended(call: asyncio.Task[None]) -> None:
            calls.discard(call)
            self._calls.discard(call)

        call = asyncio.create_task(self._call(message, writer))
        calls.add(call)
        self._calls.add(call)
        call.add_done_callback(ended)

    async def _call(self, message: Message, writer: asyncio.StreamWriter) -> None:
        handler = self._handlers.get(message.name)
        is_oneway = message.name not in self._service.results
        if message.kind == TMessageType.ONEWAY:
            if handler is not None and is_oneway:
                await handler(**vars(message.body))
            return
        if handler is None or is_oneway or message.kind != TMessageType.CALL:
            unknown = TApplicationException(TApplicationException.UNKNOWN_METHOD, f"no call '{message.name}'")
            self._send(writer, message, TMessageType.EXCEPTION, unknown)
            return
        result = self._service.results[message.name]()
        try:
            result.success = await handler(**vars(message.body))
        except GatiError as error:
            result.error = to_wire(error)
        except Exception:
            _log.exception("unexpected error in a call", extra={"call": message.name})
            internal = TApplicationException(TApplicationException.INTERNAL_ERROR, "internal error")
            self._send(writer, message, TMessageType.EXCEPTION, internal)
            return
        try:
            self._send(writer, message, TMessageType.REPLY, result)
        except RequestError as error:  # raised before anything was sent, so the caller still waits
            self._say_unsent(writer, message, error)

    def _say_unsent(self, writer: asyncio.StreamWriter, message: Message, error: RequestError) -> None:
        """Answer a call whose reply cannot be sent, because it is too large, with the reason."""
        _log.error("a reply could not be sent", extra={"call": message.name, "reason": str(error)})
        why = RequestError(f"the reply to '{message.name}' cannot be sent: {error}")
        result = self._service.results[message.name]()
        if hasattr(result, "error"):
            result.error = to_wire(why)
            self._send(writer, message, TMessageType.REPLY, result)
            return
        internal = TApplicationException(TApplicationException.INTERNAL_ERROR, str(why))
        self._send(writer, message, TMessageType.EXCEPTION, internal)

    def _send(self, writer: asyncio.StreamWriter, message: Message, kind: int, body: Any) -> None:
        if writer.transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            _log.warning("connection ended: its client does not read its replies")
            writer.transport.abort()
        elif not writer.is_closing():
            for part in encode_parts(message.name, kind, message.sequence, body, self._limits):
                writer.write(part)


class _Patience:
    """A time limit for reading from a connection; when it passes, reading raises `TimeoutError`.

    One timer serves many limits: when it fires, it checks whether the limit was extended. `unless_busy`: the
    limit does not apply while the client waits for calls.
    """

    def __init__(self, reader: asyncio.StreamReader, calls: set[asyncio.Task[None]]) -> None:
        self._reader, self._calls = reader, calls
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._end_s = self._seconds = 0.0
        self.unless_busy = True

    def wait(self, seconds: float, *, unless_busy: bool) -> None:
        """Set the limit to `seconds` from now."""
        self.unless_busy, self._seconds = unless_busy, seconds
        self._end_s = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._end_s:
            self.end()
            self._timer = self._loop.call_at(self._end_s, self._look)

    def end(self) -> None:
        """Remove the limit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self.unless_busy and self._calls:
            self._end_s = self._loop.time() + self._seconds
        if self._end_s > self._loop.time():
            self._timer = self._loop.call_at(self._end_s, self._look)
        else:
            self._reader.set_exception(TimeoutError())
