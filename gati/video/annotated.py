"""A sink that writes a video with the answers drawn into it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from gati.errors import StorageError, VideoError
from gati.types import BASE
from gati.video.decode import import_av
from gati.video.frames import Frame
from gati.video.sinks import Result

_FORMATS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska"}
_CODECS = ("libx264", "h264", "mpeg4")  # the first available one is used
_TICKS_PER_S = 1000
_EARLY, _BASE = (64, 200, 96), (240, 160, 48)  # colours of answers from a cache, and from the base model


class AnnotatedVideoSink:
    """Writes the pictures that have results, with region, class, probability and exit drawn into them.

    Consecutive results of one picture, for example of several regions, are drawn together. Pictures keep
    their stream time and are resized to the first one. The file appears when the sink is closed; until then
    its data is in a temporary file next to it, with a leading dot and the suffix `.part`. Without results
    there is no file.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        if self._path.suffix.lower() not in _FORMATS:
            raise VideoError(f"cannot write a video to {path}: the name must end in {', '.join(_FORMATS)}")
        import_av()
        self._part = self._path.with_name(f".{self._path.name}.part")
        self._frame: Frame | None = None
        self._results: list[Result] = []
        self._container: Any = None
        self._stream: Any = None
        self._last_tick = -1
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, result: Result, frame: Frame) -> None:
        """Add a result; its picture is written when a result of the next one arrives, or on `close`."""
        if self._closed:
            raise VideoError(f"video {self._path} was closed; it accepts no more results")
        if self._frame is not None and (self._frame.source, self._frame.index) != (frame.source, frame.index):
            self._write_picture()
        self._frame = frame
        self._results.append(result)

    def close(self) -> None:
        """Write the last picture and rename the file to its name; StorageError if that fails."""
        if self._closed:
            return
        self._closed = True
        try:
            self._write_picture()
            self._finish()
        except StorageError:
            with contextlib.suppress(OSError):  # the error that stopped writing may occur here as well
                self._part.unlink()
            raise

    def _finish(self) -> None:
        if self._container is not None:
            with _storing(self._path):
                self._container.mux(self._stream.encode())
                self._container.close()
                os.replace(self._part, self._path)

    def _write_picture(self) -> None:
        if self._frame is None:
            return
        image = annotate(self._frame.image, self._results)
        tick = max(round(self._frame.time_s * _TICKS_PER_S), self._last_tick + 1)
        self._frame, self._results, self._last_tick = None, [], tick
        with _storing(self._path):
            if self._container is None:
                self._open(image.width, image.height)
            even = image.resize((self._stream.width, self._stream.height)) if self._resized(image) else image
            picture = import_av().VideoFrame.from_image(even)
            picture.pts, picture.time_base = tick, Fraction(1, _TICKS_PER_S)
            self._container.mux(self._stream.encode(picture))

    def _resized(self, image: Image.Image) -> bool:
        return image.size != (self._stream.width, self._stream.height)

    def _open(self, width: int, height: int) -> None:
        av = import_av()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        codec = next((name for name in _CODECS if name in av.codecs_available), None)
        if codec is None:
            raise VideoError(f"cannot write {self._path}: FFmpeg has none of {', '.join(_CODECS)} here")
        container = av.open(str(self._part), "w", format=_FORMATS[self._path.suffix.lower()])
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height = width + width % 2, height + height % 2  # 4:2:0 wants even
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, _TICKS_PER_S)
        if codec == "mpeg4":
            stream.codec_context.bit_rate = 8 * width * height
        self._stream, self._container = stream, container  # last: Ctrl-C may come in between


def annotate(image: NDArray[np.uint8], results: list[Result]) -> Image.Image:
    """Return a copy of `image` (uint8 [H, W, 3]) with the results drawn: frames of regions, and labels."""
    picture = Image.fromarray(image)
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(max(10, picture.height // 20))
    whole = 0.0  # bottom of the whole picture's labels, in pixels
    for result in results:
        colour = _BASE if result.exit == BASE else _EARLY
        at = (0.0, whole)
        if result.region is not None:
            box = result.region
            draw.rectangle(
                (box.x, box.y, box.x + box.width - 1, box.y + box.height - 1), outline=colour, width=2
            )
            at = (float(box.x + 2), float(box.y + 2))
        bottom = _label(draw, at, _text(result), colour, font)
        whole = bottom if result.region is None else whole
    return picture


def _text(result: Result) -> str:
    name = str(result.class_index) if result.class_name is None else result.class_name
    return f"{name} {result.probability:.0%} @ {result.exit}"


def _label(
    draw: ImageDraw.ImageDraw, at: tuple[float, float], text: str, colour: tuple[int, int, int], font: Any
) -> float:
    left, top, right, bottom = draw.textbbox(at, text, font=font)
    draw.rectangle((left - 1, top - 1, right + 1, bottom + 1), fill=(0, 0, 0))
    draw.text(at, text, fill=colour, font=font)
    return bottom + 3


@contextlib.contextmanager
def _storing(path: Path) -> Iterator[None]:
    """Convert errors of the system or FFmpeg about a file to StorageError."""
    try:
        yield
    except (OSError, import_av().error.FFmpegError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise StorageError(f"cannot write {path}: {why}; free space or choose another place") from error
