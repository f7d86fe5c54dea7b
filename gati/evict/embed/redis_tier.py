"""A slow tier in Redis: one string per row, fetched in batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from reprlib import repr as shortened
from typing import Any

import numpy as np
import torch

from gati.errors import EvictError
from gati.evict.embed.redis_rows import AT_ONCE, RowReplies, commands
from gati.evict.embed.tiers import Ids, bytes_of, checked_table

_BEGUN = "begun"  # the field with the number of rows that may be there, while a table is written
_MOST = 2**32  # keys that Redis can have
_TIMEOUT_S = 5.0  # for a server to accept, or to send the next bytes, unless the URL says otherwise


class RedisTier:
    """A table in Redis, under the keys `NAME:` and eight bytes of the id, and `NAME` for its shape.

    The client has a pool of connections, so any number of threads may fetch. Write a table once with
    `RedisTier.write`.
    """

    def __init__(self, url: str, name: str) -> None:
        """Find a table at `url` (`redis://host:port/0`, `unix:///path/redis.sock`).

        A server that is silent for 5 seconds has failed; `?socket_timeout=SECONDS` in the URL changes that.
        Until then, the client may try again a few times.
        Raises EvictError without the server, the table, or the package redis.
        """
        self._url, self._name = _without_secrets(url), name
        self._prefix = _prefix_of(name)
        self._client = _client(url)
        shape = self._asked("HMGET", name, "rows", "width", "dtype")
        if None in shape:
            raise EvictError(f"{self._url} has no table {name}: write it with RedisTier.write")
        self.rows, self.width = (_size(each) for each in shape[:2])
        found = getattr(torch, shape[2].decode(errors="replace"), None)
        if not (self.rows and self.width and isinstance(found, torch.dtype)):
            rows, width, dtype = (shortened(each.decode(errors="replace")).strip("'") for each in shape)
            raise EvictError(
                f"table {name} at {self._url} has {rows} rows of {width} {dtype}, which is no table: write "
                "it again with RedisTier.write"
            )
        self.dtype: torch.dtype = found

    @classmethod
    def write(cls, url: str, name: str, weight: torch.Tensor) -> RedisTier:
        """Write a table [rows, width], replacing any of this name; its shape last.

        Raises EvictError; if the server becomes full meanwhile, nothing is left of the table. If it is full
        already, a table gives way to one of fewer rows, and otherwise stays. The next write removes the rows
        of one that was interrupted.
        """
        content = bytes_of(checked_table(weight).contiguous())
        rows, width = weight.shape
        tier = cls.__new__(cls)
        tier._url, tier._name = _without_secrets(url), name
        tier._prefix, tier._client = _prefix_of(name), _client(url)
        tier.rows, tier.width, tier.dtype = rows, width, weight.dtype
        known = tier._asked("HMGET", name, "rows", _BEGUN)
        end = max(_size(former) for former in known)
        try:
            tier._asked("HSET", name, _BEGUN, max(rows, end))
        except EvictError as error:
            if end <= rows or not _is_full(error.__cause__):
                raise
            tier._remove(0, end)  # all of it: that makes the most room, and if too little, leaves no half
            tier._asked("DEL", name)
            end = 0
            tier._asked("HSET", name, _BEGUN, rows)
        tier._asked("HDEL", name, "rows", "width", "dtype")
        tier._remove(rows, end)
        try:
            for begin in range(0, rows, AT_ONCE):
                ids = np.arange(begin, min(begin + AT_ONCE, rows))
                pairs = zip(tier._keys(ids), content[ids], strict=True)
                tier._asked("MSET", *(part for key, row in pairs for part in (key, row.tobytes())))
            dtype = str(weight.dtype).removeprefix("torch.")
            tier._asked("HSET", name, "rows", rows, "width", width, "dtype", dtype)
        except EvictError as error:
            if _is_full(error.__cause__):  # otherwise it would stay full for its other clients
                tier._remove(0, rows)
                tier._asked("DEL", name)
            raise
        tier._asked("HDEL", name, _BEGUN)
        return tier

    def fetch(self, ids: Ids) -> torch.Tensor:
        """Fetch rows. Raises EvictError if the server fails or a row is missing."""
        found: list[bytes | None] = []
        for begin in range(0, len(ids), AT_ONCE):
            found += self._asked("MGET", *self._keys(ids[begin : begin + AT_ONCE]))
        return self._rows(ids, found)

    def ask(self, ids: Ids, out: torch.Tensor) -> Callable[[], None]:
        """Fetch rows into a contiguous tensor `out` [n, width]; the server works while the caller continues.

        Returns a function that waits for the rows; call it once, from the same thread. If it has a method
        `receive`, calls of that keep the server sending.
        """
        from redis.exceptions import RedisError

        def fetch() -> None:  # reconnects, and raises the error if there is one
            out[:] = self.fetch(ids)

        pool = self._client.connection_pool
        try:
            connection = pool.get_connection()
        except RedisError:
            return fetch
        if not hasattr(connection, "_sock"):  # it is not public: without it, rows are read as usual
            pool.release(connection)
            return fetch
        try:
            connection.send_packed_command(commands(self._prefix, ids))
        except RedisError:
            connection.disconnect()
            pool.release(connection)
            return fetch

        return _AskedRows(self, connection, ids, out)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _rows(self, ids: Ids, found: list[bytes | None]) -> torch.Tensor:
        row_bytes = self.width * self.dtype.itemsize
        rows = [row for row in found if row is not None and len(row) == row_bytes]
        if len(rows) != len(ids):
            wrong = next(at for at, row in enumerate(found) if row is None or len(row) != row_bytes)
            raise EvictError(
                f"{self._url} has no row {ids[wrong]} of {row_bytes} bytes in table {self._name} "
                f"({len(ids) - len(rows)} of {len(ids)} are missing): write it with RedisTier.write, to a "
                "server that evicts no keys"
            )
        return torch.frombuffer(bytearray().join(rows), dtype=self.dtype).view(-1, self.width)

    def _remove(self, begin: int, end: int) -> None:
        for first in range(begin, end, AT_ONCE):
            self._asked("DEL", *self._keys(np.arange(first, min(first + AT_ONCE, end))))

    def _keys(self, ids: Ids) -> list[bytes]:
        packed = ids.astype("<i8").tobytes()
        return [self._prefix + packed[at : at + 8] for at in range(0, len(packed), 8)]

    def _asked(self, *command: Any) -> Any:
        from redis.exceptions import RedisError

        try:
            return self._client.execute_command(*command)
        except RedisError as error:
            raise self._failed(error) from error
        except (TypeError, ValueError) as error:  # of its constructor, or of the socket's
            raise EvictError(
                f"the address of {self._url} has an option that cannot be used: {error}"
            ) from error

    def _failed(self, error: Exception) -> EvictError:
        return EvictError(f"Redis at {self._url} failed ({error}): {_remedy(error)}")


class _AskedRows:
    """Rows that a connection was asked for."""

    def __init__(self, tier: RedisTier, connection: Any, ids: Ids, out: torch.Tensor) -> None:
        self._tier, self._connection, self._ids, self._out = tier, connection, ids, out
        self._replies = RowReplies(connection._sock, out.view(torch.uint8).numpy())

    def receive(self) -> None:
        """Take in what has arrived."""
        self._replies.receive()

    def __call__(self) -> None:
        """Wait for the rows."""
        connection, complete = self._connection, False
        try:
            with suppress(ConnectionError):  # as of an idle one that was dropped: `fetch` connects again
                complete = self._replies.read()
        except OSError as error:
            raise self._tier._failed(error) from error
        finally:
            if not complete:
                connection.disconnect()  # further replies may still arrive
            self._tier._client.connection_pool.release(connection)
        if not complete:
            self._out[:] = self._tier.fetch(self._ids)


def _prefix_of(name: str) -> bytes:
    try:
        return f"{name}:".encode()
    except UnicodeEncodeError:
        raise EvictError(f"the name {name!r} of the table cannot be encoded in UTF-8; give another") from None


def _size(field: bytes | None) -> int:
    """The number in a field; 0 for what no table can have: its rows could not be counted, nor removed."""
    digits = field or b""
    return size if digits.isdigit() and len(digits) <= 10 and (size := int(digits)) <= _MOST else 0


def _client(url: str) -> Any:
    try:
        import redis
    except ImportError:
        raise EvictError("RedisTier needs the package redis: pip install 'gati[redis]'") from None
    try:
        client = redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S)  # what the URL says goes first
    except ValueError:  # its message may quote a part of a password
        raise EvictError(
            "the address is not a Redis URL; give redis://USER:PASSWORD@HOST:PORT/0 or unix:///PATH, with "
            "characters of the password such as / and ? percent-encoded"
        ) from None
    if client.get_encoder().decode_responses:
        raise EvictError("rows are bytes, not text: leave decode_responses out of the address")
    return client


def _without_secrets(url: str) -> str:
    """The URL for messages: without user, password and options, which may be a password, too."""
    return re.sub(r"^(\w+://)?.*@", r"\1", url.partition("?")[0])


def _is_full(error: BaseException | None) -> bool:
    from redis.exceptions import OutOfMemoryError

    return isinstance(error, OutOfMemoryError)


def _remedy(error: Exception) -> str:
    from redis import exceptions

    if "max number of clients" in str(error):  # its class is that of any failed connection
        return "its limit maxclients is reached: close other connections, or raise maxclients"
    if "Too many connections" in str(error):
        return "the address limits max_connections; allow one for each thread"
    if _is_full(error):
        return "its limit maxmemory is reached: raise it, or write a smaller table"
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return "give its user and password in the URL, redis://USER:PASSWORD@HOST:PORT/0"
    if isinstance(error, exceptions.AskError | exceptions.ClusterCrossSlotError | exceptions.ClusterError):
        return "it is part of a cluster, which divides the rows of a table; use a server of its own"
    if isinstance(error, exceptions.ResponseError):
        return "the server refuses the command"
    return "is the server running, and has it room for another client (maxclients)?"  # or it just hangs up
