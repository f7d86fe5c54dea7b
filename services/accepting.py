"""Taking connections from a socket that listens, also where no more files can be opened.

The loop's own servers then take connections and close them at once, so that clients are told nothing. Here
they wait in the system's queue until a file is free.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
from collections.abc import Callable
from typing import Any

__all__ = ["PatientListener"]

_log = logging.getLogger("gati.serve")

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.05
_QUIET_S = 10.0  # between lines of the log
_AT_ONCE = 64  # connections, before others have their turn


class PatientListener:
    """Makes a protocol for each connection to `listening`, until it is closed; for the running event loop.

    `tls` are the arguments of `connect_accepted_socket` for that.
    """

    def __init__(
        self, listening: socket.socket, make: Callable[[], asyncio.BaseProtocol], tls: dict[str, Any]
    ) -> None:
        self._listening, self._make, self._tls = listening, make, tls
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        self._told_s = -math.inf
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Take no more connections, and close the socket; those that are here stay."""
        if self._closed:
            return
        self._closed = True
        if self._again is None:
            self._loop.remove_reader(self._listening)
        else:
            self._again.cancel()
        self._listening.close()

    async def wait_closed(self) -> None:
        """Wait for connections that are being made."""
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _resume(self) -> None:
        self._again = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._tell(error)
                self._loop.remove_reader(self._listening)
                self._again = self._loop.call_later(_PAUSE_S, self._resume)
                return
            task = self._loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _tell(self, error: OSError) -> None:
        if (now_s := self._loop.time()) - self._told_s >= _QUIET_S:
            _log.warning("connections wait until a file is free", extra={"reason": error.strerror})
            self._told_s = now_s

    async def _connect(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make, connection, **self._tls)
        except OSError as error:  # it has gone, or speaks no TLS
            _log.debug("connection not made", extra={"reason": str(error)})
            connection.close()
