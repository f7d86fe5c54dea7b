"""Memory limits: a budget for all running requests, and an estimate for reading one.

A request is charged before it is read, unpacked or parsed, by an upper estimate of the memory that takes. A
request that would exceed the rest is refused before anything is allocated for it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gati.errors import OverloadError, TooLargeError
from services.sharing import crowds

_RETRY_AFTER_S = 0.5
# Of a document in memory, at most: a value (a float, its place in a list and in an array), a list, an object,
# half of a text, which has two quotation marks, and a name in an object: that takes less, and more time.
_VALUE_BYTES, _LIST_BYTES, _OBJECT_BYTES, _QUOTE_BYTES, _NAME_BYTES = 48, 104, 360, 48, 360
_PIECE_BYTES = 2**18
_WIDEST = 4  # bytes a character of text that is not ASCII


class ByteBudget:
    """Bytes that requests under way may hold together. Any thread may charge.

    If it is `shared`, the requests of one owner leave a part to others, however many they are. A single
    request may have it all.
    """

    def __init__(self, limit_bytes: int, *, shared: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self._shared = shared
        self._held_bytes = 0
        self._owners: dict[str, _Held] = {}
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes charged now."""
        return self._held_bytes

    def open(self, owner: str = "") -> Charge:
        """The memory charged to one request, as a context manager that releases it at the end."""
        return Charge(self, owner)

    def _begin(self, owner: str) -> None:
        with self._lock:
            self._owners.setdefault(owner, _Held()).requests += 1

    def _take(self, owner: str, count: int) -> None:
        with self._lock:
            held = self._owners[owner]
            left = self.limit_bytes - self._held_bytes
            several = self._shared and held.requests > 1
            if count > left or (several and crowds(held.count + count, left)):
                raise OverloadError(
                    f"requests under way hold {self._held_bytes} of {self.limit_bytes} bytes",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._held_bytes += count
            held.count += count

    def _end(self, owner: str, count: int) -> None:
        with self._lock:
            held = self._owners[owner]
            self._held_bytes -= count
            held.count -= count
            held.requests -= 1
            if not held.requests:
                del self._owners[owner]


@dataclass
class _Held:
    """What the requests of one owner hold."""

    requests: int = 0
    count: int = 0


class Charge:
    """One request's part of a budget; `owner` is the model or pipeline that it is for."""

    def __init__(self, budget: ByteBudget, owner: str) -> None:
        self.owner = owner
        self._budget = budget
        self._held_bytes = 0

    def add(self, count: int) -> None:
        """Take so many bytes more. Raises `OverloadError` where so many are not left."""
        self._budget._take(self.owner, count)
        self._held_bytes += count

    def __enter__(self) -> Self:
        self._budget._begin(self.owner)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget._end(self.owner, self._held_bytes)
        self._held_bytes = 0


def check_json(text: bytes, largest_bytes: int, held_bytes: int = 0) -> int:
    """The memory that a JSON document takes once it is parsed, at most, and `held_bytes` for copies of it.

    Raises `TooLargeError` if that is more than `largest_bytes`.

    Found by counting characters, which takes a thousandth of what parsing does: piece by piece, so that
    other threads are not held up for long, and no further than the limit.
    """
    cost = held_bytes + len(text) + _VALUE_BYTES
    wide = False
    for start in range(0, len(text), _PIECE_BYTES):
        if cost > largest_bytes:
            break
        piece = text[start : start + _PIECE_BYTES]
        if not (wide or (piece.isascii() and b"\\u" not in text[start : start + _PIECE_BYTES + 1])):
            wide = True
            cost += (_WIDEST - 1) * len(text)
        cost += (
            piece.count(b",") * _VALUE_BYTES
            + piece.count(b"[") * _LIST_BYTES
            + piece.count(b"{") * _OBJECT_BYTES
            + piece.count(b'"') * _QUOTE_BYTES
            + piece.count(b":") * _NAME_BYTES
        )
    if cost > largest_bytes:
        raise TooLargeError(
            f"JSON that may take more than {largest_bytes} bytes of memory; send tensors in binary"
        )
    return cost
