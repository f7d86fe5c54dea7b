"""Rows over Redis's protocol as arrays: no Python object for a row, in the commands or in the replies."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gati.evict.embed.tiers import Ids

Bytes = NDArray[np.uint8]
AT_ONCE = 1_000  # rows per command: longer commands keep other clients waiting


class ByteStream(Protocol):
    """The side of a socket that reads."""

    def fileno(self) -> int:
        """Number of the open file."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive some bytes; 0 at the end."""


def commands(prefix: bytes, ids: Ids) -> Iterator[bytes]:
    """The commands that ask for rows, `AT_ONCE` each, whose keys are a prefix and eight bytes of the id."""
    head = b"$%d\r\n%b" % (len(prefix) + 8, prefix)
    keys = np.empty((len(ids), len(head) + 10), dtype=np.uint8)
    keys[:, : len(head)] = _bytes(head)
    keys[:, len(head) : -2] = ids.astype("<i8").view(np.uint8).reshape(-1, 8)
    keys[:, -2:] = _bytes(b"\r\n")
    for begin in range(0, len(ids), AT_ONCE):
        part = keys[begin : begin + AT_ONCE]
        yield b"*%d\r\n$4\r\nMGET\r\n%b" % (1 + len(part), part.tobytes())


class RowReplies:
    """The replies to `commands` for the rows of `out` [rows, bytes], one after the other as they arrive."""

    def __init__(self, stream: ByteStream, out: Bytes) -> None:
        self._stream, self._out = stream, out
        self._before = _bytes(b"$%d\r\n" % out.shape[1])
        self._row_bytes = len(self._before) + out.shape[1] + 2
        self._content = np.empty(0, dtype=np.uint8)  # of one reply; the next one overwrites it
        self._moved = 0  # rows of replies that are complete
        self._sound = True  # what has come is what was asked for; not while more is received
        self._begin()

    def receive(self) -> None:
        """Take in what has arrived, without waiting.

        What is not taken is acknowledged late, so the server stops sending: over loopback, after half a
        megabyte, for up to 40 ms.
        """
        arrived = select.poll()
        with suppress(OSError, ValueError):  # if the connection failed or was closed, `read` will find out
            arrived.register(self._stream, select.POLLIN)
            while self._sound and self._moved < len(self._out) and arrived.poll(0) and self._take():
                if self._filled:  # a part of a reply: the server is still sending
                    return

    def read(self) -> bool:
        """Wait until all rows are in `out`.

        Returns False as soon as anything else is read: an error, a row that is missing or of another size;
        and after a `receive` that was interrupted. What follows is then still to be read. Raises OSError if
        the connection fails.
        """
        while self._sound and self._moved < len(self._out):
            if not self._take():
                raise ConnectionError("Connection closed by server.")
        return self._sound

    def _begin(self) -> None:
        """Expect the next reply."""
        count = min(AT_ONCE, len(self._out) - self._moved)
        self._first = _bytes(b"*%d\r\n" % count)
        self._length = len(self._first) + count * self._row_bytes
        self._filled = self._checked = 0  # bytes, and rows

    def _take(self) -> int:
        """Receive some of the bytes that a reply lacks; returns how many, 0 at the end of the stream."""
        self._sound = False  # Ctrl-C may come between receiving bytes and counting them
        if len(self._content) < self._length:
            self._content = np.empty(self._length, dtype=np.uint8)
        received = self._stream.recv_into(self._content.data[self._filled : self._length])
        self._filled += received
        sound = self._as_asked()
        if sound and self._filled == self._length:
            rows = self._content[len(self._first) : self._length].reshape(-1, self._row_bytes)
            self._out[self._moved : self._moved + len(rows)] = rows[:, len(self._before) : -2]
            self._moved += len(rows)
            self._begin()
        self._sound = sound
        return received

    def _as_asked(self) -> bool:
        """Whether what has come is a part of the reply; a shorter one would be waited for."""
        filled, first, before = self._filled, self._first, self._before
        if not np.array_equal(self._content[: min(filled, len(first))], first[:filled]):
            return False
        if filled <= len(first):
            return True
        rows = self._content[len(first) : self._length].reshape(-1, self._row_bytes)
        whole, begun = divmod(filled - len(first), self._row_bytes)
        if not (rows[self._checked : whole, : len(before)] == before).all():
            return False
        self._checked = whole
        return not begun or np.array_equal(rows[whole, : min(begun, len(before))], before[:begun])


def _bytes(text: bytes) -> Bytes:
    return np.frombuffer(text, dtype=np.uint8)
