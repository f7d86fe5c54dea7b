"""The latest picture as a JPEG, encoded only when a viewer requests it."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_LARGEST_SIDE = 960  # of the JPEG that is sent, in pixels
_QUALITY = 75


class NewestPicture:
    """Holds one picture. `put` only stores it: it is encoded when a viewer requests it.

    At most `per_s` pictures per second are encoded, however many viewers there are.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s = 1.0 / per_s
        self._clock = clock
        self._newest: tuple[int, NDArray[np.uint8] | None] = 0, None  # counted from 1
        self._encoding = threading.Lock()
        self._encoded: tuple[int, bytes | None] = 0, None
        self._encoded_s = 0.0

    @property
    def number(self) -> int:
        """The number of pictures so far."""
        return self._newest[0]

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height before it is scaled down; None before the first picture."""
        image = self._newest[1]
        return None if image is None else (image.shape[1], image.shape[0])

    def put(self, image: NDArray[np.uint8]) -> None:
        """Store an array that is not modified afterwards. ValueError unless uint8 [H, W, 3]."""
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise ValueError(f"a picture must be uint8 [H, W, 3], not {image.dtype} {list(image.shape)}")
        self._newest = self.number + 1, image

    def jpeg(self) -> bytes | None:
        """Return the latest picture, or one that is at most `1 / per_s` older; None before the first."""
        with self._encoding:
            number, image = self._newest
            if image is not None and number != self._encoded[0]:
                now_s = self._clock()
                if self._encoded[1] is None or now_s - self._encoded_s >= self._pause_s:
                    self._encoded, self._encoded_s = (number, _jpeg(image)), now_s
            return self._encoded[1]


def _jpeg(picture: NDArray[np.uint8]) -> bytes:
    image = Image.fromarray(picture)
    image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()
