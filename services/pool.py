"""A few threads for work that would hold up an event loop, with a bound on what waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gati.errors import OverloadError
from services.sharing import crowds

T = TypeVar("T")

_RETRY_AFTER_S = 0.5


class BoundedPool:
    """`threads` threads; at most `waiting` calls wait for one. Methods are for the event loop's thread.

    Owners take turns, so that the calls of one do not wait for all those of another. If it is `shared`, one
    owner's calls also leave places to others.
    """

    def __init__(self, name: str, *, threads: int = 2, waiting: int = 64, shared: bool = False) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = threads + waiting
        self._shared = shared
        self._count = 0
        self._idle = threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner; whose turn it is comes first

    async def run(self, work: Callable[..., T], *arguments: Any, owner: str = "") -> T:
        """What `work` returns. Raises `OverloadError` when too much waits, and what `work` raises.

        When cancelled, what has not begun never begins, and what has begun is waited for: its memory is still
        the caller's.
        """
        left = self._most - self._count
        if not left or (self._shared and crowds(len(self._waiting.get(owner, ())) + 1, left)):
            raise OverloadError(f"{self._count} requests wait to be read", retry_after_s=_RETRY_AFTER_S)
        self._count += 1
        try:
            await self._turn(owner)
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
                self._next()
                # They hold the exception, whose traceback holds this frame and all that `work` has read.
                future = waiting = None  # type: ignore[assignment]
        finally:
            self._count -= 1

    def close(self) -> None:
        """Start no new work; running work continues."""
        for turns in self._waiting.values():
            for turn in turns:
                turn.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, owner: str) -> None:
        """Wait for a thread."""
        if self._idle:
            self._idle -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was ours already
                self._next()
            raise

    def _next(self) -> None:
        """Give a thread that is done to the owner whose turn it is."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind the others
            if not turn.done():  # or it was cancelled
                turn.set_result(None)
                return
        self._idle += 1
