"""Rows over Redis's protocol: what is sent, and replies that arrive in any pieces."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gati.evict.embed.redis_rows import AT_ONCE, Bytes, ByteStream, RowReplies, commands


def read_rows(stream: ByteStream, out: Bytes) -> bool:
    return RowReplies(stream, out).read()


class Pieces:
    """A stream that gives its bytes in pieces, and fails a test that waits for more."""

    def __init__(self, content: bytes, pieces: list[int]) -> None:
        self.content, self.pieces = content, pieces

    def fileno(self) -> int:
        raise AssertionError("no file")

    def recv_into(self, buffer: memoryview, /) -> int:
        assert self.content, "waits for bytes that never come"
        piece = self.pieces.pop() if self.pieces else len(self.content)
        given_, self.content = (
            self.content[: min(piece, len(buffer))],
            self.content[min(piece, len(buffer)) :],
        )
        buffer[: len(given_)] = given_
        return len(given_)


def reply(rows: list[bytes | None]) -> bytes:
    parts = [b"$-1\r\n" if row is None else b"$%d\r\n%b\r\n" % (len(row), row) for row in rows]
    return b"*%d\r\n" % len(rows) + b"".join(parts)


def test_commands_ask_for_a_thousand_rows_each() -> None:
    ids = np.arange(AT_ONCE + 2)
    first, second = commands(b"items:", ids)
    assert first.startswith(b"*1001\r\n$4\r\nMGET\r\n$14\r\nitems:\0\0\0\0\0\0\0\0\r\n$14\r\nitems:\1\0")
    keys = [b"$14\r\nitems:" + id_.to_bytes(8, "little") + b"\r\n" for id_ in (1000, 1001)]
    assert second == b"*3\r\n$4\r\nMGET\r\n" + b"".join(keys)


@given(
    st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=12),
    st.lists(st.integers(1, 30), max_size=40),
)
def test_rows_are_read_whatever_pieces_they_arrive_in(rows: list[bytes], pieces: list[int]) -> None:
    out = np.zeros((len(rows), 8), dtype=np.uint8)
    rest = b"+OK\r\n"
    stream = Pieces(reply(list(rows)) + rest, pieces)
    assert read_rows(stream, out)
    assert out.tobytes() == b"".join(rows)
    assert stream.content == rest  # what follows is not read


@given(
    st.lists(st.sampled_from([b"12345678", b"1234567", b"123456789", None]), min_size=1, max_size=8),
    st.lists(st.integers(1, 30), max_size=40),
)
def test_other_rows_are_noticed_without_waiting_for_more(rows: list[bytes | None], pieces: list[int]) -> None:
    found = read_rows(Pieces(reply(rows), pieces), np.zeros((len(rows), 8), dtype=np.uint8))
    assert found == all(row == b"12345678" for row in rows)


@pytest.mark.parametrize(
    "content", [b"-ERR unknown command\r\n", b"-E", b"*1\r\n$8\r\n12345678\r\n", b">2\r\n"]
)
def test_an_error_and_a_reply_to_another_command_are_noticed(content: bytes) -> None:
    assert not read_rows(Pieces(content, [2]), np.zeros((2, 8), dtype=np.uint8))


def test_a_connection_that_ends_is_an_error() -> None:
    class Ended(Pieces):
        def recv_into(self, buffer: memoryview, /) -> int:
            return 0

    with pytest.raises(ConnectionError):
        read_rows(Ended(b"", []), np.zeros((2, 8), dtype=np.uint8))


def test_what_has_arrived_is_taken_in_before_it_is_waited_for() -> None:
    """A server whose client takes nothing stops sending: Redis waited while the policy decided."""
    rows = np.random.default_rng(0).integers(0, 256, (2 * AT_ONCE + 500, 512), dtype=np.uint8)
    out = np.zeros_like(rows)
    content = b"".join(
        reply([row.tobytes() for row in rows[begin : begin + AT_ONCE]])
        for begin in range(0, len(rows), AT_ONCE)
    )
    client, server = socket.socketpair()
    with client, server:
        replies = RowReplies(client, out)
        replies.receive()  # nothing has come
        server.setblocking(False)
        sent, most = 0, len(content) - 100
        for _ in range(10_000):
            try:
                sent += server.send(content[sent:most])
            except BlockingIOError:
                replies.receive()
            if sent == most:
                break
        assert sent == most, "the server would have waited"
        whole = 2 * AT_ONCE  # replies that are complete are already where they belong, and take no memory
        np.testing.assert_array_equal(out[:whole], rows[:whole])
        server.setblocking(True)
        sender = threading.Thread(target=server.sendall, args=(content[sent:],))
        sender.start()
        assert replies.read()
        sender.join()
    np.testing.assert_array_equal(out, rows)


@pytest.mark.parametrize("content", [b"", b"-ERR unknown command\r\n", b"*1\r\n$8\r\n12345678\r\n"])
def test_what_was_taken_in_is_checked_when_it_is_read(content: bytes) -> None:
    client, server = socket.socketpair()
    with client:
        with server:
            server.sendall(content)
        replies = RowReplies(client, np.zeros((2, 8), dtype=np.uint8))
        replies.receive()
        replies.receive()
        if content:
            assert not replies.read()
        else:
            with pytest.raises(ConnectionError):
                replies.read()


def test_what_an_interrupt_lost_is_not_waited_for() -> None:
    """Ctrl-C may come between receiving a whole reply and noting it: the rest waited for what never came."""

    class Interrupted:
        def __init__(self, stream: socket.socket) -> None:
            self.stream = stream
            self.fileno = stream.fileno

        def recv_into(self, buffer: memoryview, /) -> int:
            self.stream.recv_into(buffer)
            raise KeyboardInterrupt

    rows: list[bytes | None] = [b"%08d" % at for at in range(AT_ONCE + 2)]
    client, server = socket.socketpair()
    with client, server:
        server.sendall(reply(rows[:AT_ONCE]))
        replies = RowReplies(Interrupted(client), np.zeros((len(rows), 8), dtype=np.uint8))
        with pytest.raises(KeyboardInterrupt):
            replies.receive()
        server.sendall(reply(rows[AT_ONCE:]))
        replies.receive()
        assert not replies.read()
