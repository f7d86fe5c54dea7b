"""Images that clients send, decoded within bounds."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from gati.errors import RequestError, TooLargeError
from services.scheduler.budget import Charge
from services.wire.tensors import to_tensor

__all__ = ["decode_image"]

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")
_DECODED_BYTES = 8  # a pixel, as the file has it and in the mode that is wanted
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def decode_image(data: bytes, channels: int, largest_pixels: int, charge: Charge) -> Any:
    """An image file as the wire's `Tensor`, UINT8 [1, height, width, channels].

    What its pixels take is charged before they are decoded.

    **Raises:** `RequestError` for what is no image, `TooLargeError` for one with too many pixels,
    `OverloadError` where the memory is not left.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            if image.width * image.height > largest_pixels:
                raise TooLargeError(f"an image of {image.width}x{image.height} pixels; send a smaller one")
            charge.add(image.width * image.height * (_DECODED_BYTES + 2 * channels))
            pixels = np.asarray(image.convert(_MODES.get(channels, "RGB")))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLargeError("the image has too many pixels; send a smaller one") from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
        raise RequestError(
            f"not an image that can be read ({type(error).__name__}); send {', '.join(_FORMATS)}"
        ) from error
    return to_tensor(pixels.reshape(1, image.height, image.width, -1))
