"""Accepts connections; those that come while the process has no file descriptor left wait.

uvloop's own servers accept such connections and close them at once. Here they stay in the kernel's queue
until a descriptor is free, and so do those for which there is no place. Connections whose TLS handshake is
not finished are few: the oldest goes first.
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

_PAUSE_S = 0.05  # after an error: the socket stays readable, so trying again at once would be a busy loop
_QUIET_S = 10.0  # between lines of the log
_FULL_PAUSE_S = 0.01  # while there is no place
_LAST_RECEIVED = slice(52, 56)  # of `tcp_info`: for how many milliseconds nothing more has come
_AT_ONCE = 64  # connections, before the event loop does something else


class PatientListener:
    """Gives each connection to `listening` a protocol from `make`, in the running event loop, until `close`.

    `make` is told for how many seconds what the client has sent already has waited for that.
    `places` says how many more connections there may be. With `tls`, a protocol gets its connection after the
    handshake. At most `handshakes` are under way, each for `handshake_timeout_s`; one too many ends the
    oldest, so that silent clients cannot keep others out. `close` and `wait_closed` are all that uvicorn asks
    of a server.
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

    def close(self) -> None:
        """Accept no more connections, and close the socket; accepted connections stay."""
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
        # A client that does not finish its handshake takes no place from others.
        places = self._places() - (0 if self._tls else len(self._connecting))
        if places <= 0:
            self._pause(_FULL_PAUSE_S)
            return
        for _ in range(int(min(_AT_ONCE, places))):
            try:
                connection, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor or no memory, as a rule
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
            _log.warning("cannot accept connections; they wait", extra={"reason": error.strerror})
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
        except OSError as error:  # the client has gone, or its TLS handshake failed
            _log.debug("connection failed", extra={"reason": str(error)})
            connection.close()


def waited_s(connection: socket.socket) -> float:
    """For how long what came over a TCP connection has not been read; 0 where nothing came or is known."""
    if not hasattr(socket, "TCP_INFO"):  # Linux has it
        return 0.0
    try:
        came = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_RECEIVED.stop)
    except OSError:  # nothing has come, as a rule
        return 0.0
    return int.from_bytes(known[_LAST_RECEIVED], sys.byteorder) / 1e3 if came else 0.0
