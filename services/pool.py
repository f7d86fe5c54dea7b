"""A few threads for work that would block an event loop, with a limit on the calls that wait for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from gati.errors import OverloadError
from services.sharing import crowds

T = TypeVar("T")

_RETRY_AFTER_S = 0.5


class BoundedPool:
    """`threads` threads; at most `waiting` calls wait for one. Call its methods from the event loop.

    Owners take turns, so that the calls of one do not wait for all calls of another. If it is `shared`, the
    waiting calls of one owner also leave places for others.
    """

    def __init__(self, name: str, *, threads: int = 2, waiting: int = 64, shared: bool = False) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = threads + waiting
        self._shared = shared
        self._count = 0
        self._idle = threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner, in the order of their turns

    async def run(self, work: Callable[..., T], *arguments: Any, owner: str = "") -> T:
        """Run `work` in a thread and return its result.

        If this is cancelled, waiting work never starts; running work is awaited first, because it still uses
        the caller's memory.

        **Raises:** `OverloadError` if too many calls wait, and whatever `work` raises.
        """
        left = self._most - self._count
        if not left or (self._shared and crowds(len(self._waiting.get(owner, ())) + 1, left)):
            raise OverloadError(f"{self._count} requests wait to be decoded", retry_after_s=_RETRY_AFTER_S)
        self._count += 1
        try:
            await self._turn(owner)
            try:
                future = self._threads.submit(work, *arguments)
                waiting = asyncio.wrap_future(future)
                try:
                    await asyncio.wait([waiting])  # `shield` of Python 3.14 logs what fails after it was left
                except asyncio.CancelledError:
                    future.cancel()
                    while not waiting.done():
                        with suppress(asyncio.CancelledError):  # it may be cancelled for two reasons
                            await asyncio.wait([waiting])
                    if not waiting.cancelled():
                        waiting.exception()  # or asyncio logs that an error was never looked at
                    raise
                return waiting.result()
            finally:
                self._next()
                # Break a cycle: they refer to the exception, and its traceback refers to this frame.
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
            if turn.done() and not turn.cancelled():  # a thread was already assigned
                self._next()
            elif turn in self._waiting.get(owner, ()):  # where it would count as a call that waits
                self._waiting[owner].remove(turn)
                if not self._waiting[owner]:
                    del self._waiting[owner]
            raise

    def _next(self) -> None:
        """Pass a free thread to the next owner in turn."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind the others
            if not turn.done():  # otherwise it was cancelled
                turn.set_result(None)
                return
        self._idle += 1
