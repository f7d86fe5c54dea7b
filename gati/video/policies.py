"""Policies: waiting for the caller or dropping pictures, thinning, and reconnecting."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from gati.errors import VideoError

_SMALLEST_INTERVAL_S = 1e-6
_LARGEST_EARLY = 0.1  # of an interval
_ROUNDING_S = 1e-3  # of times in files; two may each be half of it too early or late


class FramePolicy(StrEnum):
    """Handling of pictures that arrive while the caller is busy."""

    WAIT = "wait"  # the stream waits: every picture is delivered
    DROP_OLDEST = "drop-oldest"  # only the newest picture is kept


@dataclass(frozen=True)
class Reconnect:
    """Reconnection of a live source: waits grow by `factor` from `first_s` to `cap_s`, with `jitter`.

    `stall_s` without a picture counts as a lost connection, and so does `open_s` without a connection. After
    `attempts` in a row without a picture the state is `error` (None: never). The first attempt must succeed,
    so that a wrong address is reported, unless `from_start`.
    """

    first_s: float = 0.5
    factor: float = 2.0
    cap_s: float = 30.0
    jitter: float = 0.5
    attempts: int | None = None
    stall_s: float = 10.0
    open_s: float = 10.0
    from_start: bool = False

    def __post_init__(self) -> None:
        for name in ("first_s", "cap_s", "stall_s", "open_s"):
            _positive(getattr(self, name), f"the reconnection's {name}")
        if not self.factor >= 1.0 or not 0.0 <= self.jitter <= 1.0:
            raise VideoError(
                f"reconnection with factor {self.factor!r} and jitter {self.jitter!r}: the factor must be at "
                "least 1, the jitter between 0 and 1"
            )

    def waits_s(self, draw: random.Random) -> Iterator[float]:
        """Seconds to wait before each attempt: a random share between 1 - jitter and 1 of the grown wait."""
        wait = self.first_s
        while True:
            wait = min(wait, self.cap_s)
            yield wait * (1.0 - self.jitter * draw.random())
            wait *= self.factor


class Thinning:
    """Lets through at most one picture per `every_s` seconds of stream time; all pictures if it is None.

    Stream time is divided into intervals of `every_s` from the first picture on; the first picture of each
    interval goes through. So the rate does not drift if it does not divide the source's rate.
    """

    def __init__(self, every_s: float | None = None) -> None:
        self._every_s = every_s
        self._first_s: float | None = None
        self._piece = -1

    def lets_through(self, time_s: float) -> bool:
        """Whether the picture at `time_s` goes through; call once per picture, in order of time."""
        if self._every_s is None:
            return True
        if self._first_s is None:
            self._first_s = time_s
        # 0.3 / 0.1 is below 3; in files with milliseconds, the second of 30 pictures a second is at 0.033
        early = max(1e-6, min(_ROUNDING_S / self._every_s, _LARGEST_EARLY))
        piece = math.floor((time_s - self._first_s) / self._every_s + early)
        if piece <= self._piece:
            return False
        self._piece = piece
        return True


def interval_s(every_s: float | None, fps: float | None) -> float | None:
    """Return the seconds between delivered pictures, from `every_s` or `fps`; VideoError for both."""
    if every_s is not None and fps is not None:
        raise VideoError(f"both every_s={every_s:g} and fps={fps:g} were given; give one of them")
    if every_s is not None:
        return max(_positive(every_s, "the interval every_s"), _SMALLEST_INTERVAL_S)
    return None if fps is None else max(1.0 / _positive(fps, "the rate fps"), _SMALLEST_INTERVAL_S)


def _positive(value: float, what: str) -> float:
    if not (math.isfinite(value) and value > 0.0):
        raise VideoError(f"{what} is {value!r}, must be a number above 0")
    return float(value)
