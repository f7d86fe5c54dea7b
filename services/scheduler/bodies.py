"""Reading what clients send, within bounds, and noticing when they go."""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from gati.errors import CancelledError, RequestError, TooLargeError
from services.pool import BoundedPool
from services.scheduler.budget import Charge

_T = TypeVar("_T")

_STEP_BYTES = 2**18
_WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


async def read_body(request: Request, largest_bytes: int, charge: Charge, pool: BoundedPool) -> bytes:
    """The body, unpacked. What it holds is charged as it comes.

    **Raises:** `TooLargeError` when it is larger than that, packed or unpacked; `RequestError` for an
    encoding that is not offered, or a body that is not in it; `OverloadError` when all bodies together are
    too large.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > largest_bytes:
        raise _too_large(largest_bytes)
    read = _Grown(largest_bytes, charge)
    async for chunk in _stream(request):
        read.add(chunk)
    body = read.whole()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding not in _WINDOWS:
        raise RequestError(f"content encoding {encoding[:40]!r} is not offered; use gzip, deflate or none")
    return await pool.run(_unpack, body, _WINDOWS[encoding], largest_bytes, charge, owner=charge.owner)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled when the client goes. Raises `CancelledError` then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            raise CancelledError("the client has gone")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _stream(request: Request) -> AsyncIterator[bytes]:
    try:
        async for chunk in request.stream():
            if chunk:
                yield chunk
    except ClientDisconnect:
        raise CancelledError("the client has gone") from None


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _unpack(packed: bytes, window: int, largest_bytes: int, charge: Charge) -> bytes:
    """The body, which is charged as it grows."""
    unpacker = zlib.decompressobj(window)
    unpacked = _Grown(largest_bytes, charge)
    view = memoryview(packed)
    try:
        for start in range(0, len(packed), _STEP_BYTES):
            rest: bytes | memoryview = view[start : start + _STEP_BYTES]
            while rest and not unpacker.eof:
                part = unpacker.decompress(rest, _STEP_BYTES)
                rest = unpacker.unconsumed_tail
                unpacked.add(part)
    except zlib.error as error:
        raise RequestError("the body is not in the encoding that its header names") from error
    if not unpacker.eof:
        raise RequestError("the packed body ends too early")
    return unpacked.whole()


class _Grown:
    """Bytes that come in parts, in one piece and never twice: charged as they come, up to a bound."""

    def __init__(self, largest_bytes: int, charge: Charge) -> None:
        self._largest_bytes = largest_bytes
        self._charge = charge
        self._buffer = io.BytesIO()

    def add(self, part: bytes) -> None:
        """Take in a part. Raises `TooLargeError`, `OverloadError`."""
        if self._buffer.tell() + len(part) > self._largest_bytes:
            raise _too_large(self._largest_bytes)
        self._charge.add(len(part))
        self._buffer.write(part)

    def whole(self) -> bytes:
        """All of it; nothing is copied."""
        return self._buffer.getvalue()


def _too_large(largest_bytes: int) -> TooLargeError:
    return TooLargeError(f"the body is larger than {largest_bytes} bytes; send less")
