"""A Thrift client for asyncio: many concurrent calls on one connection."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from contextlib import suppress
from typing import Any

from thrift.Thrift import TMessageType

from gati.errors import DeadlineError, NotAllowedError, OverloadError, RequestError, UnavailableError
from gati.hosts import address_of
from services.wire.codec import READ_BYTES, Frames, Limits, Message, Service, encode_parts
from services.wire.errors import from_wire
from services.wire.handshake import prove

_log = logging.getLogger("gati.wire")

UNIX = "unix:"  # prefix of the path of a socket, in place of host and port
_MOST_UNSENT_BYTES = 64 * 2**20  # buffered for a server that does not read
_LAST_SEQUENCE = 2**31 - 1  # of a message; then they begin at 1 again
_LOST_S = 5  # without a response from the other machine's system; its processes may take longer
_PROBES = 3


class WireClient:
    """One connection to a service, at `host` and `port` or at a Unix socket, `unix:PATH`.

    Call `connect` first. After the connection is lost, every call raises `UnavailableError`.
    """

    def __init__(
        self,
        service: Service,
        host: str,
        port: int = 0,
        *,
        limits: Limits | None = None,
        secret: bytes | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._path = host.removeprefix(UNIX) if host.startswith(UNIX) else None
        self.address = address_of(host, port) if self._path is None else host
        self._service = service
        self._host = host
        self._port = port
        self._limits = limits or Limits()
        self._secret = secret  # shared with the server
        self._tls = tls
        self._sequence = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether calls can be made."""
        return self._reading is not None and not self._reading.done()

    async def connect(self, timeout_s: float = 5.0) -> None:
        """Open the connection. Raises `UnavailableError`."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, self._writer = await self._open()
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", None) or error.reason
            raise UnavailableError(f"TLS with {self.address} failed ({why})", retry_after_s=1.0) from error
        except (OSError, TimeoutError, ValueError, OverflowError) as error:  # ValueError: an invalid name
            raise UnavailableError(f"nothing answers at {self.address}", retry_after_s=1.0) from error
        if self._secret is not None:
            await self._prove(reader, self._writer, self._secret, timeout_s)
        self._reading = asyncio.create_task(self._read(reader))

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._path is not None:
            return await asyncio.open_unix_connection(self._path)
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        notice_loss(writer.get_extra_info("socket").fileno())
        return reader, writer

    async def _prove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, timeout_s: float
    ) -> None:
        """Do the handshake of the shared secret. If it fails, closes the connection: `UnavailableError`."""
        try:
            async with asyncio.timeout(timeout_s):
                await prove(reader, writer, secret)
        except (NotAllowedError, asyncio.IncompleteReadError, OSError, TimeoutError) as error:
            writer.close()
            ours = isinstance(error, NotAllowedError)
            why = f"is {error}" if ours else "does not accept our secret, or uses TLS"
            raise UnavailableError(f"{self.address} {why}", retry_after_s=1.0) from error

    async def call(self, name: str, *arguments: Any, timeout_s: float) -> Any:
        """Make a call and wait for its result.

        **Raises:** `DeadlineError` after `timeout_s`, `UnavailableError` if the connection is lost, and the
        error with which the service refuses the call.
        """
        sequence = self._next_sequence()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting[sequence] = answer
        late = loop.call_later(timeout_s, _expire, answer, timeout_s)
        try:
            self._send(name, TMessageType.CALL, sequence, arguments)
            result = await answer
        finally:
            late.cancel()
            self._waiting.pop(sequence, None)
        if getattr(result, "error", None) is not None:
            raise from_wire(result.error)
        return getattr(result, "success", None)

    def post(self, name: str, *arguments: Any) -> None:
        """Make a call that has no result; does nothing if the connection is lost, or the service is stuck."""
        with suppress(UnavailableError, OverloadError):
            self._send(name, TMessageType.ONEWAY, self._next_sequence(), arguments)

    async def lost(self, timeout_s: float | None = None) -> bool:
        """Wait until the connection is lost, at most `timeout_s`; returns whether it is."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=timeout_s)
        return not self.connected

    async def idle(self, timeout_s: float) -> None:
        """Wait until the current calls are answered, at most `timeout_s`."""
        if self._waiting:
            await asyncio.wait(list(self._waiting.values()), timeout=timeout_s)

    async def close(self) -> None:
        """Close the connection; unanswered calls raise `UnavailableError`."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._writer is not None:
            self._writer.close()

    def _next_sequence(self) -> int:
        self._sequence = self._sequence % _LAST_SEQUENCE + 1
        return self._sequence

    def _send(self, name: str, kind: int, sequence: int, arguments: tuple[Any, ...]) -> None:
        if self._writer is None or not self.connected or self._writer.is_closing():
            raise UnavailableError(f"the connection to {self.address} is lost", retry_after_s=1.0)
        if self._writer.transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            raise OverloadError(f"{self.address} does not read what it is sent", retry_after_s=1.0)
        body = self._service.arguments[name](*arguments)
        for part in encode_parts(name, kind, sequence, body, self._limits):
            self._writer.write(part)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            frames = Frames(self._limits)
            while data := await reader.read(READ_BYTES):
                for frame in frames.take(data):
                    self._answer(self._service.decode(frame, self._limits))
            _log.debug("connection ended", extra={"address": self.address})
        except (OSError, RequestError) as error:
            _log.debug("connection lost", extra={"address": self.address, "reason": str(error)})
        finally:  # also after `close`: waiting callers must be released
            lost = UnavailableError(f"the connection to {self.address} was lost", retry_after_s=1.0)
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(lost)
                    answer.exception()  # marks it as retrieved, as the caller may have been cancelled
            if self._writer is not None:
                self._writer.close()

    def _answer(self, message: Message) -> None:
        answer = self._waiting.get(message.sequence)
        if answer is None or answer.done():
            return
        if message.kind == TMessageType.REPLY:
            answer.set_result(message.body)
        else:
            answer.set_exception(UnavailableError(f"{self.address} failed: {message.body.message}"))


def _expire(answer: asyncio.Future[Any], timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(DeadlineError(f"no answer within {1e3 * timeout_s:.0f} ms"))


def notice_loss(file: int) -> None:
    """Let the system end a TCP connection (a file descriptor) if the other machine vanishes silently.

    Otherwise calls on it would wait for their deadlines, although another replica might answer them.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # only Linux has it
        return
    with socket.socket(fileno=os.dup(file)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_S - _PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _LOST_S)


def connect_to(
    service: Service, address: str, *, secret: bytes | None = None, tls: ssl.SSLContext | None = None
) -> WireClient:
    """A client for `HOST:PORT` or `unix:PATH`, not connected yet. Raises `UnavailableError` for neither."""
    if address.startswith(UNIX):
        return WireClient(service, address)
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and len(port) <= 5):
        raise UnavailableError(f"{address!r} is not an address; give HOST:PORT", retry_after_s=1.0)
    return WireClient(service, host.strip("[]"), int(port), secret=secret, tls=tls)
