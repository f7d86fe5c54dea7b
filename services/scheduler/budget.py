"""Memory limits: a budget for all requests in progress, and an upper bound on the memory to parse JSON.

Bytes are charged as a body is read or decompressed. Parsing and decoding are charged beforehand, by an upper
bound on the memory they need: a request that would exceed the rest of the budget is refused before that
memory is allocated.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gati.errors import OverloadError, TooLargeError
from services.sharing import crowds

_RETRY_AFTER_S = 0.5
# The most memory that each part of a parsed document takes: a value (a float, its slot in a list and in an
# array), a list, an object, half of a string (each has two quotation marks), and a key in an object. The last
# is more than a key needs in memory, because keys take longer to parse.
_VALUE_BYTES, _LIST_BYTES, _OBJECT_BYTES, _QUOTE_BYTES, _NAME_BYTES = 48, 104, 360, 48, 360
_OTHERS = bytes(set(range(256)) - set(b',[{":\\'))  # all but the signs that are counted
_PIECE_BYTES = 2**18
_WIDEST = 4  # bytes per character of a string that is not ASCII


class ByteBudget:
    """Bytes that all requests in progress may hold together. Thread-safe.

    If `shared`, several requests of one owner always leave a part of the budget to other owners. A single
    request may use all that is free.
    """

    def __init__(self, limit_bytes: int, *, shared: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self._shared = shared
        self._held_bytes = 0
        self._owners: dict[str, _Held] = {}
        self._lock = threading.Lock()

    def open(self, owner: str = "") -> Charge:
        """A context manager: the memory charged to one request, released at the end."""
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
                    f"requests in progress hold {self._held_bytes} of {self.limit_bytes} bytes of memory",
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
    """How many requests one owner has, and the bytes they hold."""

    requests: int = 0
    count: int = 0


class Charge:
    """One request's part of a budget; `owner` is its model or pipeline, such as `models/NAME`."""

    def __init__(self, budget: ByteBudget, owner: str) -> None:
        self.owner = owner
        self._budget = budget
        self._held_bytes = 0

    def add(self, count: int) -> None:
        """Charge `count` more bytes. Raises `OverloadError` if the budget does not have them."""
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
    """An upper bound on the memory in bytes that a JSON document takes once parsed, plus `held_bytes`.

    `held_bytes` is for copies of the document. Raises `TooLargeError` if the sum exceeds `largest_bytes`.

    The bound comes from counting characters, which takes less time than parsing. They are counted in pieces,
    so that other threads do not wait long for the GIL, and only until the limit is exceeded.
    """
    cost = held_bytes + len(text) + _VALUE_BYTES
    wide = False
    for start in range(0, len(text), _PIECE_BYTES):
        if cost > largest_bytes:
            break
        piece = text[start : start + _PIECE_BYTES]
        signs = piece.translate(None, _OTHERS)  # few, so that each count takes no time
        escapes = b"\\" in signs and b"\\u" in text[start : start + _PIECE_BYTES + 1]
        if not wide and (escapes or not piece.isascii()):
            wide = True
            cost += (_WIDEST - 1) * len(text)
        cost += (
            signs.count(b",") * _VALUE_BYTES
            + signs.count(b"[") * _LIST_BYTES
            + signs.count(b"{") * _OBJECT_BYTES
            + signs.count(b'"') * _QUOTE_BYTES
            + signs.count(b":") * _NAME_BYTES
        )
    if cost > largest_bytes:
        raise TooLargeError(
            f"parsing this JSON may take more than {largest_bytes} bytes of memory; send tensors in binary"
        )
    return cost
