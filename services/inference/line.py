"""The queue of audits: bounded and in order, so that hits and misses are dropped alike.

A place is reserved before the answer is known; without a free place the request is not audited. Hits, which
wait for the reference, and misses, which do not, are settled in the order of their requests. A kill or a
failing reference therefore loses both alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from services.inference.counts import Counts
from services.logs import log_failure

_log = logging.getLogger("gati.inference")

_PLACES = 64
_PATIENCE_S = 30.0

Job = Callable[[], Awaitable[None]]


class Reservation:
    """A reserved place in the queue, to be filled by a job or released."""

    def __init__(self, line: Line) -> None:
        self._line: Line | None = line
        self.lost = False  # True: its request is not audited

    def fill(self, job: Job) -> None:
        """Use the place for a job."""
        line, self._line = self._line, None
        if line is not None:
            line._add(self, job)

    def leave(self) -> None:
        """Free the place."""
        line, self._line = self._line, None
        if line is not None:
            line._free(self)


class Line:
    """Runs jobs one after the other. Not thread-safe: call from the event loop."""

    def __init__(self, counts: Counts, places: int = _PLACES) -> None:
        self._counts = counts
        self._places = places
        self._taken: set[Reservation] = set()
        self._jobs: deque[tuple[Reservation | None, Job]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._closed = False

    def reserve(self) -> Reservation | None:
        """Reserve a place; None if no place is free: then the request is not audited."""
        if self._closed or len(self._taken) >= self._places:
            self._counts.left_out += 1
            return None
        place = Reservation(self)
        self._taken.add(place)
        return place

    async def settled(self) -> None:
        """Wait until all jobs now in the line are done, at most 30 s."""
        done = asyncio.get_running_loop().create_future()

        async def reached() -> None:
            if not done.done():
                done.set_result(None)

        self._jobs.append((None, reached))
        self._work()
        await asyncio.wait([done], timeout=_PATIENCE_S)

    async def close(self) -> None:
        """Refuse new jobs, run those in the line for at most 30 s, and drop the rest."""
        self._closed = True
        await self.settled()
        self._drop()
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    # ----------------------------------------------------------------------------------------------------

    def _add(self, place: Reservation, job: Job) -> None:
        self._jobs.append((place, job))
        self._work()

    def _free(self, place: Reservation) -> None:
        self._taken.discard(place)

    def _work(self) -> None:
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._jobs:
            place, job = self._jobs.popleft()
            try:
                if place is None or not place.lost:
                    await job()
            except Exception as error:  # of any type: later jobs must still run
                log_failure(_log, "an audit failed; all waiting audits are dropped", error)
                self._drop()
            finally:
                if place is not None:
                    self._free(place)

    def _drop(self) -> None:
        """Drop all reservations that are not settled, regardless of their outcomes."""
        for place in self._taken:
            self._counts.left_out += not place.lost
            place.lost = True
