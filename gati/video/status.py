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

    `source_fps` is measured, in stream time, on the pictures that decoded, whatever a header declares;
    `processed_fps` is what the caller takes, by the clock. Both are None until two pictures came, and cover
    the last 120 of them. `delivered` pictures went to the caller; `dropped` ones were overtaken by newer ones
    while the caller was busy; `corrupt` ones could not be decoded. Pictures that thinning or a pause left out
    are none of these. `frame_age_s` is how long the last delivered picture had waited since it arrived (0 for
    files and folders, which wait); None before the first.
    """

    source_fps: float | None
    processed_fps: float | None
    delivered: int
    dropped: int
    corrupt: int
    frame_age_s: float | None
    reconnects: int


class Rate:
    """Events per second over the last ones that were told."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_RATE_MEMORY)

    def tell(self, time_s: float) -> None:
        """An event happened at `time_s`."""
        self._times_s.append(time_s)

    @property
    def per_s(self) -> float | None:
        """The rate, or None before two events at different times."""
        times = tuple(self._times_s)  # another thread may be telling
        if len(times) < 2 or times[-1] <= times[0]:
            return None
        return (len(times) - 1) / (times[-1] - times[0])
