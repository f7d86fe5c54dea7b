"""Rows over Redis's protocol as arrays: no Python object for a row, in the commands or in the replies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gati.evict.embed.tiers import Ids

Bytes = NDArray[np.uint8]
AT_ONCE = 1_000  # rows per command: longer commands keep other clients waiting


class ByteStream(Protocol):
    """The side of a socket that reads."""

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


def read_rows(stream: ByteStream, out: Bytes) -> bool:
    """Read the replies to `commands` into `out` [rows, bytes].

    Returns False as soon as anything else is read: an error, a row that is missing or of another size. What
    follows is then still to be read. Raises OSError if the connection fails.
    """
    return all(_read_reply(stream, out[begin : begin + AT_ONCE]) for begin in range(0, len(out), AT_ONCE))


def _read_reply(stream: ByteStream, out: Bytes) -> bool:
    count, size = out.shape
    first, before = _bytes(b"*%d\r\n" % count), _bytes(b"$%d\r\n" % size)
    reply = np.empty(len(first) + count * (len(before) + size + 2), dtype=np.uint8)
    rows = reply[len(first) :].reshape(count, -1)
    memory, filled, checked = reply.data, 0, 0
    while filled < len(reply):
        received = stream.recv_into(memory[filled:])
        if received == 0:
            raise ConnectionError("Connection closed by server.")
        filled += received
        # a shorter reply is noticed at once, or the rest of it would be waited for
        if not np.array_equal(reply[: min(filled, len(first))], first[:filled]):
            return False
        whole, begun = divmod(max(filled - len(first), 0), rows.shape[1])
        if not (rows[checked:whole, : len(before)] == before).all():
            return False
        if begun and not np.array_equal(rows[whole, : min(begun, len(before))], before[:begun]):
            return False
        checked = whole
    out[:] = rows[:, len(before) : -2]
    return True


def _bytes(text: bytes) -> Bytes:
    return np.frombuffer(text, dtype=np.uint8)
