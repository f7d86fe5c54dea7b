"""Reading what clients send, within bounds, and noticing when they go."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from gati.errors import CancelledError, RequestError, TooLargeError

__all__ = ["read_body", "unless_gone"]

_T = TypeVar("_T")

_WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


async def read_body(request: Request, largest_bytes: int) -> bytes:
    """The body, unpacked.

    **Raises:** `TooLargeError` when it is larger than that, packed or unpacked; `RequestError` for an
    encoding that is not offered, or a body that is not in it.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > largest_bytes:
        raise _too_large(largest_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > largest_bytes:
            raise _too_large(largest_bytes)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return bytes(body)
    if encoding not in _WINDOWS:
        raise RequestError(f"content encoding {encoding[:40]!r} is not offered; use gzip, deflate or none")
    return _unpack(bytes(body), _WINDOWS[encoding], largest_bytes)


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


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _unpack(packed: bytes, window: int, largest_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(window)
    try:
        body = unpacker.decompress(packed, largest_bytes + 1)
    except zlib.error as error:
        raise RequestError("the body is not in the encoding that its header names") from error
    if len(body) > largest_bytes:
        raise _too_large(largest_bytes)
    if not unpacker.eof:
        raise RequestError("the packed body ends too early")
    return body


def _too_large(largest_bytes: int) -> TooLargeError:
    return TooLargeError(f"the body is larger than {largest_bytes} bytes; send less")
