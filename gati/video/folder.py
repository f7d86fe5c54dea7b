"""A folder of images as a stream: one image per second, in natural sort order."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from gati.errors import DataError, VideoError
from gati.model.depth import eight_bits
from gati.video.decode import Picture

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_UNREADABLE = (
    UnidentifiedImageError,
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    Image.DecompressionBombWarning,
    Image.DecompressionBombError,
)


class Folder:
    """The images of a folder, `image2` before `image10`; damaged ones are skipped and counted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.corrupt = 0

    def __iter__(self) -> Iterator[Picture]:
        files = self._files()
        if not files:
            raise VideoError(f"folder {self._path} has no images ({', '.join(_SUFFIXES)}); check the path")
        seconds = 0
        for path in sorted(files, key=lambda path: natural_key(path.name)):
            image = _read(path)
            if image is None:
                self.corrupt += 1
            else:
                yield Picture(float(seconds), _constant(image))
            seconds += 1
        if self.corrupt == seconds:
            raise VideoError(f"folder {self._path} has {seconds} images, and none of them can be read")

    def _files(self) -> list[Path]:
        try:
            listed = list(self._path.iterdir())
        except OSError as error:
            raise VideoError(f"cannot read folder {self._path}: {error.strerror}") from None
        return [path for path in listed if path.suffix.lower() in _SUFFIXES and path.is_file()]

    def close(self) -> None:
        """Does nothing: no file is held open."""


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key that compares numbers within names by value, and letters case-insensitively."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    ordered = tuple((0, int(part)) if part.isdecimal() else (1, part.casefold()) for part in parts)
    return (*ordered, (2, name))  # breaks ties such as a1 and a01


def _read(path: Path) -> NDArray[np.uint8] | None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")  # of pictures that it can read, for each again
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=_FORMATS) as image:
                return np.asarray(eight_bits(image).convert("RGB"))
    except (*_UNREADABLE, DataError):
        return None


def _constant(image: NDArray[np.uint8]) -> Callable[[], NDArray[np.uint8]]:
    return lambda: image
