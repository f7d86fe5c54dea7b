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
    """The replies to `commands` for `count` rows of `size` bytes each."""

    def __init__(self, stream: ByteStream, count: int, size: int) -> None:
        self._stream = stream
        self._replies = [_Reply(min(AT_ONCE, count - begin), size) for begin in range(0, count, AT_ONCE)]
        self._at = 0  # the first that is not complete
        self._lost = False  # bytes that were received, as Ctrl-C came before they were counted

    def receive(self) -> None:
        """Take in what has arrived, without waiting.

        What is not taken is acknowledged late, so the server stops sending: over loopback, after half a
        megabyte, for up to 40 ms.
        """
        arrived = select.poll()
        with suppress(OSError, ValueError):  # if the connection failed or was closed, `read` will find out
            arrived.register(self._stream, select.POLLIN)
            while self._at < len(self._replies) and not self._lost and arrived.poll(0) and self._take():
                continue

    def read(self, out: Bytes) -> bool:
        """Wait for all rows, and copy them into `out` [count, size]; called once.

        Returns False as soon as anything else is read: an error, a row that is missing or of another size;
        and after a `receive` that was interrupted. What follows is then still to be read. Raises OSError if
        the connection fails.
        """
        if self._lost:
            return False
        for number, reply in enumerate(self._replies):
            while reply.sound() and not reply.complete:
                before = reply.filled
                self._take()
                if reply.filled == before:
                    raise ConnectionError("Connection closed by server.")
            if not reply.complete or not reply.sound():
                return False
            begin = number * AT_ONCE
            reply.move_to(out[begin : begin + AT_ONCE])
        return True

    def _take(self) -> bool:
        """Receive a part of the first reply that is not complete; whether all that was asked for came."""
        reply = self._replies[self._at]
        self._lost = True
        reply.take(self._stream)
        self._lost = False
        self._at += reply.complete
        return reply.complete


class _Reply:
    """One reply, in memory from its first byte until its rows are moved."""

    def __init__(self, count: int, size: int) -> None:
        self._first, self._before = _bytes(b"*%d\r\n" % count), _bytes(b"$%d\r\n" % size)
        self._length = len(self._first) + count * (len(self._before) + size + 2)
        self._shape = count, len(self._before) + size + 2
        self._content = np.empty(0, dtype=np.uint8)
        self._checked = 0  # rows
        self.filled = 0

    @property
    def complete(self) -> bool:
        return self.filled == self._length

    def take(self, stream: ByteStream) -> None:
        """Receive some of the bytes that are missing; none at the end of the stream."""
        if not len(self._content):
            self._content = np.empty(self._length, dtype=np.uint8)
        self.filled += stream.recv_into(self._content.data[self.filled :])

    def sound(self) -> bool:
        """Whether what has come is a part of the reply; a shorter one would be waited for."""
        filled, first, before = self.filled, self._first, self._before
        if not np.array_equal(self._content[: min(filled, len(first))], first[:filled]):
            return False
        if filled <= len(first):
            return True
        rows = self._content[len(first) :].reshape(self._shape)
        whole, begun = divmod(filled - len(first), self._shape[1])
        if not (rows[self._checked : whole, : len(before)] == before).all():
            return False
        self._checked = whole
        return not begun or np.array_equal(rows[whole, : min(begun, len(before))], before[:begun])

    def move_to(self, out: Bytes) -> None:
        """Copy the rows [count, size] of a complete reply, and free its memory."""
        out[:] = self._content[len(self._first) :].reshape(self._shape)[:, len(self._before) : -2]
        self._content = np.empty(0, dtype=np.uint8)


def _bytes(text: bytes) -> Bytes:
    return np.frombuffer(text, dtype=np.uint8)
