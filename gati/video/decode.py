"""Reads the pictures of a video with PyAV, in order of time, without damaged ones."""

from __future__ import annotations

import heapq
import importlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from statistics import median_high
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gati.errors import VideoError
from gati.video.reach import Reach

if TYPE_CHECKING:
    from av.container import InputContainer

T = TypeVar("T")

_DEFAULT_RATE = 25.0  # pictures per second if neither timestamps nor a header give it
_REORDERED = 4  # reordering window in pictures: files without presentation times use decoding order
_UNSPECIFIED_SPACE, _RESERVED_SPACE = 2, 3  # FFmpeg's numbers; some encoders write the reserved one
_LATE = "no answer in time"
_REASONS = {
    "ExitError": _LATE,
    "InvalidDataError": "not a video of a known kind, or damaged at its beginning",
    "HTTPUnauthorizedError": "user or password refused (401)",
    "HTTPForbiddenError": "access refused (403)",
    "HTTPNotFoundError": "nothing there by that name (404)",
}


class Picture(NamedTuple):
    """A decoded picture: `time_s` in stream time, and `image()` to convert it to RGB uint8 [H, W, 3]."""

    time_s: float
    image: Callable[[], NDArray[np.uint8]]


class DecodedVideo(Protocol):
    """An opened stream. Iterate and close it in one thread; `corrupt` counts undecodable pictures."""

    corrupt: int

    def __iter__(self) -> Iterator[Picture]:
        """Pictures in order of time; VideoError when the stream breaks."""

    def close(self) -> None:
        """Close the file or connection."""


def import_av() -> Any:
    """Return the package `av`; if it is missing, VideoError with the command that installs it."""
    try:
        return importlib.import_module("av")
    except ImportError:
        pass_on = 'reading and writing video needs the package av; run: pip install "gati[stream]"'
    raise VideoError(pass_on)


def open_video(
    address: str,
    name: str,
    reach: Reach,
    *,
    form: str | None = None,
    timeouts_s: tuple[float, float] | None = None,
    live: bool | None = False,
) -> Video:
    """Open what `address` means to FFmpeg within its `reach`, and show it as `name`; the caller closes it.

    `form` names the format where it cannot be guessed, `timeouts_s` bounds connecting and every read. `live`
    None: if it is `endless`.
    **Raises:** `VideoError`, which neither shows `address` nor is chained to an error that does.
    """
    av = import_av()
    began_s = time.monotonic()
    try:
        container = av.open(
            address, format=form, options=dict(reach.options), timeout=timeouts_s, metadata_errors="replace"
        )
    except (av.error.FFmpegError, OSError, ValueError) as error:
        # RTSP calls an interrupted connection invalid data
        late = timeouts_s is not None and time.monotonic() - began_s >= timeouts_s[0]
        reason = _LATE if late else reach.meaning_of(error) or reason_of(error)
    else:
        if container.streams.video:
            return Video(container, name, live=live)
        container.close()
        reason = "there are no pictures in it, or it is cut short"
    raise VideoError(f"cannot read {name}: {reason}")


def reason_of(error: Exception) -> str:
    """The error without the address: FFmpeg's messages quote it, password included."""
    known = _REASONS.get(type(error).__name__)
    return known or getattr(error, "strerror", None) or type(error).__name__


class Video:
    """The pictures of an opened video or connection.

    Pictures that do not decode, or that the decoder marks as damaged, are skipped and counted in `corrupt`.
    A truncated recording ends early; a live stream that breaks off raises VideoError. So does a recording
    without any picture. `endless`: neither its size nor its duration is known, as of live streams.
    """

    def __init__(self, container: InputContainer, name: str, *, live: bool | None = False) -> None:
        self._container = container
        self._stream = container.streams.video[0]
        self._name = name
        self.corrupt = 0
        self.endless = container.size <= 0 and (
            (container.duration or 0) <= 0
            # in fragments: what FFmpeg calls the duration is that of those it has read
            or ("mp4" in container.format.name and self._stream.frames == 0)
        )
        self._live = self.endless if live is None else live

    def __iter__(self) -> Iterator[Picture]:
        rate = self._stream.average_rate or self._stream.base_rate
        frames = ((frame.time, frame) for frame in self._frames())
        window = 1 if self._live else _REORDERED  # live pictures are not delayed for reordering
        first_s = None
        for time_s, frame in in_order(frames, 1.0 / float(rate or _DEFAULT_RATE), window):
            first_s = time_s if first_s is None else first_s
            yield Picture(time_s - first_s, lambda frame=frame: self._image(frame))  # type: ignore[misc]
        if first_s is None and not self._live:
            raise VideoError(
                f"cannot read {self._name}: none of its pictures can be decoded ({self.corrupt} damaged)"
            )

    def close(self) -> None:
        """Close the file or connection."""
        self._container.close()

    def _frames(self) -> Iterator[Any]:
        av = import_av()
        for packet in self._packets():
            try:
                frames = packet.decode()
            except av.error.FFmpegError:
                self.corrupt += 1
                continue
            for frame in frames:
                if frame.is_corrupt:
                    self.corrupt += 1
                else:
                    yield frame

    def _packets(self) -> Iterator[Any]:
        av = import_av()
        packets = self._container.demux(self._stream)
        reason = ""
        while not reason:
            try:
                packet = next(packets, None)
            except av.error.InvalidDataError:
                self.corrupt += 1
                if not self._live:
                    return
                reason = "the data became unreadable"
            except (av.error.FFmpegError, OSError) as error:
                reason = reason_of(error)
            else:
                if packet is None:
                    return
                yield packet
        raise VideoError(f"{self._name} stopped: {reason}")

    def _image(self, frame: Any) -> NDArray[np.uint8]:
        image = self._rgb(frame)
        quarters = round(frame.rotation / 90.0) % 4  # phones store pictures rotated
        return np.ascontiguousarray(np.rot90(image, quarters)) if quarters else image

    def _rgb(self, frame: Any) -> NDArray[np.uint8]:
        if frame.colorspace == _RESERVED_SPACE:
            frame.colorspace = _UNSPECIFIED_SPACE
        try:
            # one thread: to start more for each picture takes longer than to convert it
            image: NDArray[np.uint8] = frame.to_ndarray(format="rgb24", threads=1)
        except import_av().error.FFmpegError as error:
            raise VideoError(
                f"cannot convert the pictures of {self._name} to RGB ({frame.format.name} in colour space "
                f"{frame.colorspace}: {reason_of(error)}); use a usual colour space, such as BT.709"
            ) from None
        return image


def in_order(
    items: Iterable[tuple[float | None, T]], period_s: float, window: int = _REORDERED
) -> Iterator[tuple[float, T]]:
    """Yield the items, in the order given, with strictly rising timestamps in seconds.

    Timestamps out of order within `window` items are sorted. One that is missing or still not above its
    predecessor becomes the predecessor plus the usual gap of late, but at most `period_s`.
    """
    waiting: deque[T] = deque()
    stamps: list[float] = []
    rising = _Rising(period_s)
    newest: float | None = None
    for stamp, item in items:
        if stamp is None:
            stamp = 0.0 if newest is None else newest + rising.gap_s
        newest = stamp
        waiting.append(item)
        heapq.heappush(stamps, stamp)
        if len(waiting) >= window:
            yield rising.next(heapq.heappop(stamps)), waiting.popleft()
    while waiting:
        yield rising.next(heapq.heappop(stamps)), waiting.popleft()


class _Rising:
    """Makes timestamps strictly rising."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._gaps = deque([period_s], maxlen=5)
        self._last_s: float | None = None

    @property
    def gap_s(self) -> float:
        """To what follows without a timestamp of its own: neither a pause nor one short gap is a rate."""
        return min(self._period_s, median_high(self._gaps))

    def next(self, stamp_s: float) -> float:
        if self._last_s is not None:
            if stamp_s > self._last_s:
                self._gaps.append(stamp_s - self._last_s)
            else:
                stamp_s = self._last_s + self.gap_s
        self._last_s = stamp_s
        return stamp_s
