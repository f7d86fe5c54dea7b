"""Accepts connections; while the process has no free file descriptor, new connections wait.

uvloop's own servers accept such connections and immediately close them. Here they stay in the kernel's accept
queue until a descriptor is free. They also stay there while the limit on connections is reached. The number
of unfinished TLS handshakes is limited, too: one too many ends the oldest.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

_log = logging.getLogger("gati.serve")

_PAUSE_S = 0.05  # after an error: the socket stays readable, so an immediate retry would be a busy loop
_QUIET_S = 10.0  # between two log lines
_FULL_PAUSE_S = 0.01  # while the limit on connections is reached
_LAST_RECEIVED = slice(52, 56)  # in `tcp_info`: milliseconds since data last arrived
_AT_ONCE = 64  # connections accepted before the event loop continues with other work


class PatientListener:
    """Gives each connection to `listening` a protocol from `make`, in the running event loop, until `close`.

    `make` receives the time in seconds that data of the client has waited to be read, 0 if it has sent none.
    `places` returns how many more connections may be accepted. With `tls`, a protocol gets its connection
    after the handshake. At most `handshakes` are under way, each for at most `handshake_timeout_s`; one too
    many ends the oldest, so silent clients cannot keep others out. `close` and `wait_closed` are the methods
    of a server that uvicorn calls.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[float], asyncio.BaseProtocol],
        *,
        places: Callable[[], float] = lambda: math.inf,
        tls: ssl.SSLContext | None = None,
        handshakes: int = 1000,
        handshake_timeout_s: float = 10.0,
    ) -> None:
        self._listening, self._make, self._places, self._handshakes = listening, make, places, handshakes
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls = {"ssl": tls, "ssl_handshake_timeout": handshake_timeout_s}
        self._loop = asyncio.get_running_loop()
        self._connecting: dict[asyncio.Task[None], None] = {}  # oldest first
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        self._logged_s = -math.inf
        listening.setblocking(False)
        self._resume()

    def renew(self, tls: ssl.SSLContext) -> None:
        """Use this context for the TLS handshakes of new connections."""
        self._tls["ssl"] = tls

    def close(self) -> None:
        """Accept no more connections, and close the socket; accepted connections stay open."""
        if self._closed:
            return
        self._closed = True
        if self._again is None:
            self._loop.remove_reader(self._listening)
        else:
            self._again.cancel()
        self._listening.close()

    async def wait_closed(self) -> None:
        """Wait for accepted connections whose TLS handshake is not finished."""
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _resume(self) -> None:
        self._again = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        # With TLS, an unfinished handshake does not count: such clients must not take places from others.
        places = self._places() - (0 if self._tls else len(self._connecting))
        if places <= 0:
            self._pause(_FULL_PAUSE_S)
            return
        for _ in range(int(min(_AT_ONCE, places))):
            try:
                connection, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # usually no free file descriptor, or no memory
                self._log(error)
                self._pause(_PAUSE_S)
                return
            if self._tls and len(self._connecting) >= self._handshakes:
                oldest = next(iter(self._connecting))
                del self._connecting[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._connect(connection))
            self._connecting[task] = None
            task.add_done_callback(partial(self._connected, connection))

    def _connected(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._connecting.pop(task, None)
        if task.cancelled():
            connection.close()

    def _log(self, error: OSError) -> None:
        if (now_s := self._loop.time()) - self._logged_s >= _QUIET_S:
            _log.warning("cannot accept connections now; they wait", extra={"reason": error.strerror})
            self._logged_s = now_s

    def _pause(self, pause_s: float) -> None:
        self._loop.remove_reader(self._listening)
        self._again = self._loop.call_later(pause_s, self._resume)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            make = partial(self._make, waited_s(connection))
            await self._loop.connect_accepted_socket(make, connection, **self._tls)
        except OSError as error:  # the client disconnected, or its TLS handshake failed
            _log.debug("connection failed", extra={"reason": str(error)})
            connection.close()


def waited_s(connection: socket.socket) -> float:
    """Seconds since unread data last arrived on a TCP connection; 0 if there is none, or it is unknown."""
    if not hasattr(socket, "TCP_INFO"):  # only Linux has it
        return 0.0
    try:
        came = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_RECEIVED.stop)
    except OSError:  # usually: nothing has arrived
        return 0.0
    return int.from_bytes(known[_LAST_RECEIVED], sys.byteorder) / 1e3 if came else 0.0
