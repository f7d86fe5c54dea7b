"""Reading request bodies, with limits on size and memory, and detecting that a client disconnects."""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request

from gati.errors import CancelledError, RequestError, TooLargeError
from services.http import tell_when_gone
from services.pool import BoundedPool
from services.scheduler.budget import Charge

_T = TypeVar("_T")

_STEP_BYTES = 2**18
_SMALL_BYTES = 2**15  # a compressed body; waiting for a thread may take longer than to decompress it
_WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


async def read_body(request: Request, largest_bytes: int, charge: Charge, pool: BoundedPool) -> bytes:
    """Read a body and decompress it. Its bytes are charged as they arrive.

    **Raises:** `TooLargeError` if it exceeds `largest_bytes`, compressed or decompressed; `RequestError` for
    an unsupported content encoding, or a body that does not match it; `OverloadError` if the budget for all
    requests is used up; `CancelledError` if the client disconnects.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > largest_bytes:
        raise _too_large(largest_bytes)
    read, more = _Grown(largest_bytes, charge), True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise CancelledError("the client has gone")
        if part := message.get("body"):
            read.add(part)
        more = message.get("more_body", False)
    body = read.whole()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding not in _WINDOWS:
        raise RequestError(f"content encoding {encoding[:40]!r} is not supported; use gzip, deflate or none")
    window = _WINDOWS[encoding]
    if len(body) <= _SMALL_BYTES:
        with suppress(TooLargeError):  # decompressed it may be large all the same
            return _unpack(body, window, min(_STEP_BYTES, largest_bytes), charge)
    unpacking = pool.run(_unpack, body, window, largest_bytes, charge, owner=charge.owner)
    return await unless_gone(request, unpacking)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`; if the client disconnects, cancel it and raise `CancelledError`."""
    own = asyncio.current_task()
    if own is None:
        raise AssertionError("requests are answered in tasks")
    before, gone = own.cancelling(), False

    def leave() -> None:
        nonlocal gone
        gone = True
        own.cancel()

    forget = tell_when_gone(request.scope, leave)
    try:
        return await work
    except asyncio.CancelledError:
        if not gone or own.cancelling() > before + 1:  # or the task was cancelled for another reason, too
            raise
        raise CancelledError("the client has gone") from None
    finally:
        forget()
        if gone:
            own.uncancel()


def _unpack(packed: bytes, window: int, largest_bytes: int, charge: Charge) -> bytes:
    """Decompress a body, and charge its bytes as it grows."""
    unpacker = zlib.decompressobj(window)
    unpacked = _Grown(largest_bytes, charge)
    view = memoryview(packed)
    try:
        for start in range(0, len(packed), _STEP_BYTES):
            rest: bytes | memoryview = view[start : start + _STEP_BYTES]
            while rest:
                if unpacker.eof:  # such as a second file of gzip, which would be left out silently
                    raise RequestError("data follow the compressed body; compress it as a whole")
                part = unpacker.decompress(rest, _STEP_BYTES)
                rest = unpacker.unconsumed_tail or unpacker.unused_data
                unpacked.add(part)
    except zlib.error as error:
        raise RequestError("the body does not match its Content-Encoding header") from error
    if not unpacker.eof:
        raise RequestError("the compressed body is incomplete")
    return unpacked.whole()


class _Grown:
    """Joins the parts of a body without holding it in memory twice. Charges each part; limits the total."""

    def __init__(self, largest_bytes: int, charge: Charge) -> None:
        self._largest_bytes = largest_bytes
        self._charge = charge
        self._first = b""  # usually the whole body
        self._buffer: io.BytesIO | None = None

    def add(self, part: bytes) -> None:
        """Add a part. Raises `TooLargeError`, `OverloadError`."""
        before = len(self._first) if self._buffer is None else self._buffer.tell()
        if before + len(part) > self._largest_bytes:
            raise _too_large(self._largest_bytes)
        self._charge.add(len(part))
        if not before:
            self._first = part
            return
        if self._buffer is None:
            self._buffer = io.BytesIO()
            self._buffer.write(self._first)
            self._first = b""
        self._buffer.write(part)

    def whole(self) -> bytes:
        """The whole body, without a copy."""
        return self._first if self._buffer is None else self._buffer.getvalue()


def _too_large(largest_bytes: int) -> TooLargeError:
    return TooLargeError(f"the body is larger than {largest_bytes} bytes; send less")
