"""A live stream: one thread reads it and keeps the newest picture, another supervises the connection."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from gati.errors import VideoError
from gati.video.decode import Picture
from gati.video.feeds import Clock, Connect, Feed, Taken
from gati.video.policies import Reconnect, Thinning
from gati.video.status import SourceState

_POLL_S = 0.02  # polling interval of the watchdog
_FAREWELL_S = 1.0  # time for threads to release the connection after `close`

Sleep = Callable[[float], object]


class Live(Feed):
    """Keeps the newest picture of a stream that does not wait, in a buffer of one.

    A picture that the caller has not taken when the next one arrives is dropped and counted. A connection
    that ends, breaks, or delivers no picture for `reconnect.stall_s` is replaced. Its thread is abandoned, as
    a driver may block it forever. With `reconnect=None`, a recording is played in real time as if it were
    live.
    """

    def __init__(
        self,
        connect: Connect,
        thinning: Thinning,
        reconnect: Reconnect | None,
        *,
        clock: Clock = time.monotonic,
        sleep: Sleep | None = None,
        draw: random.Random | None = None,
    ) -> None:
        super().__init__(thinning, clock)
        self._connect = connect
        self._reconnect = reconnect
        self._closing = threading.Event()
        self._sleep: Sleep = self._closing.wait if sleep is None else sleep
        self._draw = draw or random.Random()
        self._slot: Taken | None = None
        self._began_s: float | None = None
        self._line: _Line | None = None
        self._corrupt_before = 0
        self._watcher = threading.Thread(target=self._watch, name="gati-video-watchdog", daemon=True)
        self._working = SourceState.RECONNECTING

    @property
    def corrupt(self) -> int:
        """Pictures that did not decode, over all connections."""
        return self._corrupt_before + (0 if self._line is None else self._line.corrupt)

    def start(self) -> None:
        """Start connecting in the background; `take` and `state` report the outcome."""
        self._watcher.start()

    def take(self) -> Taken | None:
        """Wait for a new picture and return the newest; None when the stream is over."""
        with self._changed:
            self._changed.wait_for(self._something_to_take)
            taken, self._slot = self._slot, None
            if self._closed:
                return None
            if taken is None and self._working == SourceState.ERROR:
                raise VideoError(self.reason)
            return taken

    def pause(self) -> None:
        """Let `take` wait until `resume`; meanwhile the stream is read and its pictures are skipped."""
        with self._changed:
            self._paused = True
            self._slot = None

    def close(self) -> None:
        """End the feed; threads that do not stop within a second are abandoned."""
        super().close()
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join(_FAREWELL_S)
        if self._line is not None:
            self._line.thread.join(_FAREWELL_S)

    def _something_to_take(self) -> bool:
        over = self._working in (SourceState.ENDED, SourceState.ERROR)
        return self._closed or over or (self._slot is not None and not self._paused)

    def _watch(self) -> None:
        """The watchdog thread: one connection after another until there is a reason to stop."""
        rule = self._reconnect
        connected_once = rule is not None and rule.from_start
        failures = 0
        waits_s = None if rule is None else rule.waits_s(self._draw)
        while not self._closed:
            line = self._one_connection()
            if self._closed:
                break
            connected_once = connected_once or line.pictures > 0
            failures = 0 if line.pictures else failures + 1
            if rule is None or waits_s is None:
                return self._over(SourceState.ERROR if line.failed else SourceState.ENDED, line.reason)
            if not connected_once:
                return self._over(SourceState.ERROR, line.reason)
            if rule.attempts is not None and failures >= rule.attempts:
                tries = "attempt" if failures == 1 else "attempts"
                return self._over(SourceState.ERROR, f"{line.reason}; gave up after {failures} {tries}")
            if line.pictures:
                waits_s = rule.waits_s(self._draw)
            with self._changed:
                # an address of one picture, such as that of a snapshot, is not lost after each
                if not self._closed and (line.failed or line.pictures != 1):
                    self._enter(SourceState.RECONNECTING, line.reason)
            self._sleep(next(waits_s))
            self.reconnects += not self._closed
        return None

    def _one_connection(self) -> _Line:
        """Connect, and wait until the connection ends or must be abandoned."""
        line = _Line(self._connect, self._arrived, self._clock)
        with self._changed:
            self._corrupt_before, self._line = self.corrupt, line
        line.thread.start()
        while not line.over.wait(_POLL_S) and not self._closed:
            if self._reconnect is not None and line.stalled(self._reconnect):
                break
        with self._changed:
            line.abandoned = True
        return line

    def _arrived(self, line: _Line, picture: Picture) -> bool:
        """Receive a picture from a connection's thread; False tells the thread to stop."""
        if self._reconnect is None:
            self._keep_pace(picture.time_s)
        with self._changed:
            if line.abandoned or self._closed:
                return False
            now_s = self._clock()
            line.heard_s, line.pictures = now_s, line.pictures + 1
            self._enter(SourceState.RUNNING)
            time_s = self._stream_time(picture, now_s)
            number = self._count(time_s)
            if not self._paused and self._thinning.lets_through(time_s):
                self.dropped += self._slot is not None
                self._slot = Taken(picture._replace(time_s=time_s), number, now_s)
                self._changed.notify_all()
            return True

    def _stream_time(self, picture: Picture, now_s: float) -> float:
        """Seconds since the first picture: by the clock, as timestamps of live streams are unreliable."""
        if self._reconnect is None:
            return picture.time_s
        self._began_s = now_s if self._began_s is None else self._began_s
        return now_s - self._began_s

    def _keep_pace(self, time_s: float) -> None:
        now_s = self._clock()
        self._began_s = now_s - time_s if self._began_s is None else self._began_s
        if (early_s := self._began_s + time_s - now_s) > 0.0:
            self._sleep(early_s)

    def _over(self, state: SourceState, reason: str) -> None:
        with self._changed:
            self._finish(state, reason)


class _Line:
    """One connection and the thread that reads it, until it is over or told to stop."""

    def __init__(self, connect: Connect, arrived: Callable[[_Line, Picture], bool], clock: Clock) -> None:
        self._connect = connect
        self._arrived = arrived
        self._clock = clock
        self.thread = threading.Thread(target=self._run, name="gati-video-reader", daemon=True)
        self.over = threading.Event()
        self.connected = False
        self.abandoned = False
        self.failed = True
        self.heard_s = clock()
        self.pictures = 0
        self.corrupt = 0
        self.reason = "the reader of the stream failed"

    def stalled(self, rule: Reconnect) -> bool:
        """Whether no data arrived for too long; sets the reason if so."""
        limit_s = rule.stall_s if self.connected else rule.open_s
        if self._clock() - self.heard_s <= limit_s:
            return False
        what = "no picture came" if self.connected else "no connection"
        self.reason = f"{what} for {limit_s:g} s"
        return True

    def _run(self) -> None:
        try:
            pictures = self._connect()
            self.heard_s = self._clock()  # first: whoever sees a connection looks at it
            self.connected = True
            try:
                for picture in pictures:
                    self.corrupt = pictures.corrupt
                    if not self._arrived(self, picture):
                        break
            finally:
                self.corrupt = pictures.corrupt
                pictures.close()
            self.failed, self.reason = False, "the stream ended"
        except VideoError as error:
            if not self.abandoned:
                self.reason = str(error)
        finally:
            self.over.set()
