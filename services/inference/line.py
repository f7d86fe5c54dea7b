"""The queue of audits: bounded, in order, and hits and misses are dropped alike.

A place is reserved before anything is known of an answer, and where none is free nothing is looked at. Hits,
which wait for the reference, and misses, which do not, stand in the same line and are settled one after the
other: whatever ends the line, a kill or a reference that fails, loses both alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from gati.errors import GatiError
from services.inference.counts import Counts

__all__ = ["Line", "Reservation"]

_log = logging.getLogger("gati.inference")

_PLACES = 64
_PATIENCE_S = 30.0

Job = Callable[[], Awaitable[None]]


class Reservation:
    """A place in the line, to be filled by a job or given back."""

    def __init__(self, line: Line) -> None:
        self._line: Line | None = line
        self.lost = False  # what was drawn then is not looked at

    def fill(self, job: Job) -> None:
        """Stand in line with a job."""
        line, self._line = self._line, None
        if line is not None:
            line._add(self, job)

    def leave(self) -> None:
        """Give the place back; nothing came of it."""
        line, self._line = self._line, None
        if line is not None:
            line._free(self)


class Line:
    """Does jobs one after the other. Its methods belong to the event loop's thread."""

    def __init__(self, counts: Counts, places: int = _PLACES) -> None:
        self._counts = counts
        self._places = places
        self._taken: set[Reservation] = set()
        self._jobs: deque[tuple[Reservation | None, Job]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._closed = False

    def reserve(self) -> Reservation | None:
        """A place; None where all are taken, and what was drawn is left out."""
        if self._closed or len(self._taken) >= self._places:
            self._counts.left_out += 1
            return None
        place = Reservation(self)
        self._taken.add(place)
        return place

    async def settled(self) -> None:
        """Wait until all jobs now in the line are done, up to a time limit."""
        done = asyncio.get_running_loop().create_future()

        async def reached() -> None:
            if not done.done():
                done.set_result(None)

        self._jobs.append((None, reached))
        self._work()
        await asyncio.wait([done], timeout=_PATIENCE_S)

    async def close(self) -> None:
        """Settle what stands in line, drop what is left, and take nothing more."""
        self._closed = True
        await self.settled()
        self._drop()
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    # ----------------------------------------------------------------------------------------------------

    def _add(self, place: Reservation, job: Job) -> None:
        if place.lost:
            self._free(place)
            return
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
            except Exception as error:  # whatever it was, what stands behind it must not depend on it
                trace = None if isinstance(error, GatiError) else error
                extra = {"reason": str(error)}
                _log.warning("not looked at, nor what was drawn meanwhile", extra=extra, exc_info=trace)
                self._drop()
            finally:
                if place is not None:
                    self._free(place)

    def _drop(self) -> None:
        """Lose everything that was drawn and is not settled, whatever would have come of it."""
        for place in self._taken:
            self._counts.left_out += not place.lost
            place.lost = True
