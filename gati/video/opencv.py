"""Reads cameras and videos with OpenCV, which opens cameras on macOS and Windows."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import VideoError
from gati.video.decode import Picture, in_order

_DEFAULT_RATE = 25.0  # pictures per second if the device or file does not report it
_QUIET_FFMPEG = "-8"  # keeps FFmpeg from printing errors; they are raised as VideoError


class OpenCvVideo:
    """The pictures of an opened camera or video.

    Pictures that do not decode are skipped and counted in `corrupt`. A truncated recording ends early; a
    camera that stops raises VideoError, and so does a recording without any picture.
    """

    def __init__(self, capture: Any, name: str, *, live: bool) -> None:
        self._cv2 = import_cv2()
        self._capture, self._name, self._live = capture, name, live
        self.corrupt = 0

    def __iter__(self) -> Iterator[Picture]:
        rate = self._capture.get(self._cv2.CAP_PROP_FPS)
        window = {"window": 1} if self._live else {}  # live pictures are not delayed for reordering
        first_s = None
        for time_s, pixels in in_order(self._decoded(), 1.0 / (rate or _DEFAULT_RATE), **window):
            first_s = time_s if first_s is None else first_s
            yield Picture(time_s - first_s, partial(self._image, pixels))
        if self._live:
            raise VideoError(f"{self._name} stopped: the camera delivers no more pictures")
        if first_s is None:
            raise VideoError(
                f"cannot read {self._name}: none of its pictures can be decoded ({self.corrupt} damaged)"
            )

    def close(self) -> None:
        """Release the camera or file."""
        self._capture.release()

    def _decoded(self) -> Iterator[tuple[float | None, NDArray[np.uint8]]]:
        while self._capture.grab():
            stamp_ms = self._capture.get(self._cv2.CAP_PROP_POS_MSEC)
            # at once: the next picture takes its place in the device's buffer
            decoded, pixels = self._capture.retrieve()
            if not decoded:
                self.corrupt += 1
                continue
            # cameras have no time of their own, or always 0
            yield None if self._live else stamp_ms / 1e3, pixels

    def _image(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        image: NDArray[np.uint8] = self._cv2.cvtColor(pixels, self._cv2.COLOR_BGR2RGB)
        return image


def import_cv2() -> Any:
    """Return the package `cv2`; if it is missing, VideoError with the command that installs it."""
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", _QUIET_FFMPEG)
    try:
        cv2 = importlib.import_module("cv2")
    except ImportError:
        advice = 'reading with OpenCV needs the package cv2; run: pip install "gati[opencv]"'
    else:
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
        return cv2
    raise VideoError(advice)


def open_camera(number: int, name: str) -> OpenCvVideo:
    """Open the system's camera `number`, counted from 0. Raises VideoError if there is none."""
    capture = import_cv2().VideoCapture(number)
    if not capture.isOpened():
        capture.release()
        raise VideoError(
            f"{name} was not found: the system has no camera {number}, or another program uses it"
        )
    return OpenCvVideo(capture, name, live=True)


def open_recording(path: Path, name: str) -> OpenCvVideo:
    """Open a video file. Raises VideoError if it is missing or not a video."""
    cv2 = import_cv2()
    if not path.is_file():
        raise VideoError(f"there is no file {str(path)!r} to read video from")
    capture = cv2.VideoCapture(str(path.absolute()), cv2.CAP_FFMPEG)
    if not capture.isOpened():
        capture.release()
        raise VideoError(f"cannot read {name}: not a video of a known kind, or damaged at its beginning")
    return OpenCvVideo(capture, name, live=False)
