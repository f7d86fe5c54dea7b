"""Feeds deliver pictures to the caller: read on request, or by a thread that keeps the newest."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gati.errors import VideoError
from gati.video.decode import DecodedVideo, Picture, Video
from gati.video.policies import Thinning
from gati.video.status import Rate, SourceState

Clock = Callable[[], float]
Connect = Callable[[], DecodedVideo]
OnState = Callable[[SourceState, str], object]


class Taken(NamedTuple):
    """A picture on its way to the caller, with its index in the stream and its arrival time by the clock."""

    picture: Picture
    number: int
    arrived_s: float


class Feed:
    """Base class of feeds: a lock, pause, and counts. One thread calls `take`; any may pause and close."""

    def __init__(self, thinning: Thinning, clock: Clock = time.monotonic) -> None:
        self._thinning = thinning
        self._clock = clock
        self._changed = threading.Condition()
        self._paused = False
        self._closed = False
        self._working = SourceState.RUNNING
        self._decoded = 0
        self.rate = Rate()
        self.dropped = 0
        self.reconnects = 0
        self.reason = ""
        self.on_state: OnState | None = None  # called with a new state and its reason, by any thread
        self._told: tuple[SourceState, str] | None = None

    @property
    def corrupt(self) -> int:
        """Pictures that did not decode."""
        return 0

    @property
    def state(self) -> SourceState:
        """The current state; `paused` unless the feed has ended."""
        over = self._working in (SourceState.ENDED, SourceState.ERROR)
        return SourceState.PAUSED if self._paused and not over else self._working

    def start(self) -> None:
        """Open the source."""
        raise NotImplementedError

    def take(self) -> Taken | None:
        """Wait for the next picture; None at the end. VideoError if the source failed."""
        raise NotImplementedError

    def pause(self) -> None:
        """Let `take` wait until `resume`."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def close(self) -> None:
        """End the feed, from any thread; a waiting `take` returns None."""
        with self._changed:
            self._closed = True
            self._finish(SourceState.ENDED)

    def _finish(self, state: SourceState, reason: str = "") -> None:
        """Set the final state, once; call with the lock held."""
        if self._working not in (SourceState.ENDED, SourceState.ERROR):
            self._enter(state, reason)
        self._changed.notify_all()

    def _enter(self, state: SourceState, reason: str = "") -> None:
        """Set the state, and report what is new; call with the lock held, so that reports stay in order."""
        self._working, self.reason = state, reason or self.reason
        if self._told != (state, reason):
            self._told = state, reason
            if self.on_state is not None:
                self.on_state(state, reason)

    def _count(self, time_s: float) -> int:
        """Count a picture that decoded, and return its index."""
        self._decoded += 1
        self.rate.tell(time_s)
        return self._decoded - 1


class Recording(Feed):
    """Reads in the caller's thread, one picture per call: all pictures are delivered."""

    def __init__(self, connect: Connect, thinning: Thinning, clock: Clock = time.monotonic) -> None:
        super().__init__(thinning, clock)
        self._connect = connect
        self._pictures: DecodedVideo | None = None
        self._iterator: Iterator[Picture] = iter(())
        self._reading = threading.Lock()  # the reader is closed between two pictures, never within one

    @property
    def corrupt(self) -> int:
        """Pictures that did not decode."""
        return 0 if self._pictures is None else self._pictures.corrupt

    def start(self) -> None:
        """Open the recording; VideoError if that fails."""
        with self._failing(), self._reading:
            self._pictures = self._connect()
            self._iterator = iter(self._pictures)

    def give_up_endless(self) -> DecodedVideo | None:
        """Return what was opened if no end of it is known, for another feed to read and close; else None."""
        with self._reading:
            if self._closed or not isinstance(self._pictures, Video) or not self._pictures.endless:
                return None
            opened, self._pictures = self._pictures, None
            return opened

    def take(self) -> Taken | None:
        """The next picture after thinning; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused or self._closed)
        with self._failing(), self._reading:
            while not self._closed and (picture := next(self._iterator, None)) is not None:
                number = self._count(picture.time_s)
                if self._thinning.lets_through(picture.time_s):
                    return Taken(picture, number, self._clock())
        with self._changed:
            self._finish(SourceState.ENDED)
        return None

    def close(self) -> None:
        """End the feed, and close the file after the current read."""
        super().close()
        with self._reading:
            if self._pictures is not None:
                self._pictures.close()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except VideoError as error:
            with self._changed:
                self._finish(SourceState.ERROR, str(error))
            raise
