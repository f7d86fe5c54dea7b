"""The latest picture as a JPEG, encoded only when a viewer requests it."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_LARGEST_SIDE = 960  # of the JPEG that is sent, in pixels
_QUALITY = 75


class _Picture(NamedTuple):
    number: int
    content: bytes | NDArray[np.uint8]


class NewestPicture:
    """Holds one picture. `put` only stores it: it is encoded when a viewer requests it.

    At most `per_s` pictures per second are encoded, however many viewers there are.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s = 1.0 / per_s
        self._clock = clock
        self._newest: _Picture | None = None
        self._encoding = threading.Lock()
        self._encoded: _Picture | None = None
        self._encoded_s = 0.0

    @property
    def number(self) -> int:
        """The number of pictures so far."""
        newest = self._newest
        return 0 if newest is None else newest.number

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height of an array before it is scaled down; None for a JPEG, which contains its size."""
        newest = self._newest
        if newest is None or isinstance(newest.content, bytes):
            return None
        return newest.content.shape[1], newest.content.shape[0]

    def put(self, image: bytes | NDArray[np.uint8]) -> None:
        """Store a JPEG, or an array that is not modified afterwards. ValueError unless uint8 [H, W, 3]."""
        if not isinstance(image, bytes) and (
            image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape
        ):
            raise ValueError(
                f"a picture must be a JPEG or uint8 [H, W, 3], not {image.dtype} {list(image.shape)}"
            )
        self._newest = _Picture(self.number + 1, image)

    def jpeg(self) -> bytes | None:
        """Return the latest picture, or one that is at most `1 / per_s` older; None before the first."""
        with self._encoding:
            newest, encoded = self._newest, self._encoded
            if newest is None:
                return None
            if encoded is None or (
                encoded.number != newest.number and self._clock() - self._encoded_s >= self._pause_s
            ):
                self._encoded_s = self._clock()
                encoded = self._encoded = _Picture(newest.number, _jpeg(newest.content))
            assert isinstance(encoded.content, bytes)
            return encoded.content


def _jpeg(content: bytes | NDArray[np.uint8]) -> bytes:
    if isinstance(content, bytes):
        return content
    image = Image.fromarray(content)
    image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()
