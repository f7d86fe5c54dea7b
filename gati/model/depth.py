"""Pictures of more than 8 bits per channel. Needs only NumPy, not torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gati.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST = 65_535


def eight_bits(image: Image) -> Image:
    """Return a Pillow image with 8 bits per channel; others are returned as they are.

    The upper byte of 16 bits is kept, as Pillow itself does for colour. For grey it would clip instead, so
    that nearly everything is white.

    **Raises:** `DataError` for floating-point pixels, and values beyond 16 bits.
    """
    if image.mode == "F":
        raise DataError("the image has floating-point pixels, whose range is not known: convert it to 8 bits")
    if not image.mode.startswith("I"):
        return image
    from PIL.Image import fromarray

    values = np.asarray(image)
    if values.size and not (values.min() >= 0 and values.max() <= _LARGEST):
        raise DataError(f"the image has values beyond 0 to {_LARGEST}: convert it to 8 bits")
    return fromarray((values >> 8).astype(np.uint8))
