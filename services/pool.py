"""A few threads for work that would hold up an event loop, with a bound on what waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gati.errors import OverloadError

__all__ = ["BoundedPool"]

T = TypeVar("T")

_RETRY_AFTER_S = 0.5


class BoundedPool:
    """`threads` threads; at most `waiting` calls wait for one. Methods are for the event loop's thread."""

    def __init__(self, name: str, *, threads: int = 2, waiting: int = 64) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = threads + waiting
        self._count = 0

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """What `work` returns. Raises `OverloadError` when too much waits, and what `work` raises.

        When cancelled, what has not begun never begins, and what has begun is waited for: its memory is still
        the caller's.
        """
        if self._count >= self._most:
            raise OverloadError(f"{self._count} requests wait to be read", retry_after_s=_RETRY_AFTER_S)
        self._count += 1
        try:
            future = self._threads.submit(work, *arguments)
            waiting = asyncio.wrap_future(future)
            try:
                return await asyncio.shield(waiting)
            except asyncio.CancelledError:
                if not future.cancel():
                    await asyncio.wait([waiting])
                raise
        finally:
            self._count -= 1

    def close(self) -> None:
        """Start no new work; running work continues."""
        self._threads.shutdown(wait=False, cancel_futures=True)
