"""States and statistics of a source."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

_RATE_MEMORY = 120  # times remembered


class SourceState(StrEnum):
    """State of a source."""

    RUNNING = "running"
    PAUSED = "paused"
    RECONNECTING = "reconnecting"
    ENDED = "ended"
    ERROR = "error"


@dataclass(frozen=True)
class SourceStatistics:
    """Counts and rates of a source since it was opened.

    `source_fps` is measured in stream time on decoded pictures, whatever a header declares; `processed_fps`
    is the caller's rate, by the clock. Both cover the last 120 pictures and are None before the second.
    `delivered` pictures went to the caller; `dropped` ones were replaced by newer ones while the caller was
    busy; `corrupt` ones could not be decoded. Pictures skipped by thinning or a pause are not counted.
    `frame_age_s` is the time from arrival to delivery of the last delivered picture (0 for files and folders,
    which wait); None before the first.
    """

    source_fps: float | None
    processed_fps: float | None
    delivered: int
    dropped: int
    corrupt: int
    frame_age_s: float | None
    reconnects: int


class Rate:
    """Events per second over the most recent events."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_RATE_MEMORY)

    def tell(self, time_s: float) -> None:
        """Record an event at `time_s`."""
        self._times_s.append(time_s)

    @property
    def per_s(self) -> float | None:
        """The rate, or None before two events at different times."""
        times = tuple(self._times_s)  # another thread may append meanwhile
        if len(times) < 2 or times[-1] <= times[0]:
            return None
        return (len(times) - 1) / (times[-1] - times[0])
