"""Decodes images sent by clients, with limits on pixels and memory."""

from __future__ import annotations

import io
import re
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from gati.errors import DataError, RequestError, TooLargeError
from gati.model.depth import eight_bits
from services.pool import BoundedPool
from services.scheduler.budget import Charge
from services.wire.codec import LARGE_BYTES
from services.wire.gen.ttypes import Tensor

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")
_DECODED_BYTES = 8  # per pixel inside a decoder, at most
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_STRIP_PIXELS = 2**18
_SMALL_PIXELS, _SMALL_BYTES = 2**14, 2**13
_QUICK = (b"\x89PNG", b"\xff\xd8")  # begin PNG and JPEG; what decodes some of the other formats is in Python
_SLOW = (b"zTXt", b"iTXt", b"iCCP", b"Exif", b"MPF\0")  # parts that take long to unpack or to read
_SCAN = b"\xff\xda"  # begins each scan of a JPEG
_MOST_SCANS = 100  # a progressive JPEG has about ten; each may take as long as all the pixels
_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")  # begins a part of a JPEG, with its length, or ends it
_END = b"\xff\xd9"
_MOST_PARTS = 10_000  # of a JPEG
warnings.filterwarnings("ignore", module=r"PIL\.")  # what a client sends may warn a thousand times


async def read_image(
    data: bytes, channels: int, largest_pixels: int, charge: Charge, pool: BoundedPool
) -> Any:
    """As `decode_image`, in a thread of the pool unless that may take longer. Raises `OverloadError`."""
    if _is_quick(data):
        with suppress(TooLargeError):  # a small file may have many pixels
            return decode_image(data, channels, min(_SMALL_PIXELS, largest_pixels), charge)
    return await pool.run(decode_image, data, channels, largest_pixels, charge, owner=charge.owner)


def _is_quick(data: bytes) -> bool:
    """Whether a file with few pixels is decoded within milliseconds, whatever else it contains."""
    return (
        len(data) <= _SMALL_BYTES
        and data.startswith(_QUICK)
        and data.count(_SCAN) <= 1
        and not any(part in data for part in _SLOW)
    )


def decode_image(data: bytes, channels: int, largest_pixels: int, charge: Charge) -> Any:
    """Decode an image file to the wire's `Tensor`, UINT8 [1, height, width, channels].

    The memory for its pixels is charged before they are decoded.

    **Raises:** `RequestError` if it is not a readable image, `TooLargeError` if it has too many pixels,
    `OverloadError` if the memory budget does not have enough left.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > largest_pixels:
            raise TooLargeError(
                f"the image has too many pixels ({image.width}x{image.height}); send a smaller one"
            )
        if isinstance(image, JpegImageFile) and _has_very_many_scans(data):
            raise RequestError(f"the JPEG has more than {_MOST_SCANS} scans; save it again")
        charge.add(image.width * image.height * (_DECODED_BYTES + channels))
        pixels = _pixels(image, _MODES.get(channels, "RGB"))
    except Image.DecompressionBombError as error:
        raise TooLargeError("the image has too many pixels; send a smaller one") from error
    except DataError as error:
        raise RequestError(str(error)) from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
        raise RequestError(
            f"not an image that can be read ({type(error).__name__}); send {', '.join(_FORMATS)}"
        ) from error
    return Tensor("UINT8", [1, *pixels.shape], _content(pixels))


def _has_very_many_scans(data: bytes) -> bool:
    """Whether a JPEG has more than `_MOST_SCANS`; what follows its end, such as a phone's video, has none."""
    if data.count(_SCAN) <= _MOST_SCANS:
        return False
    scans = at = 0
    for _ in range(_MOST_PARTS):
        found = _MARKER.search(data, at)
        if found is None or found[0] == _END:
            return False
        scans += found[0] == _SCAN
        if scans > _MOST_SCANS:
            return True
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
    return True


def _pixels(image: Image.Image, mode: str) -> NDArray[np.uint8]:
    """Pixels [height, width, channels], converted in strips so that no second full copy is in memory."""
    found = np.empty((image.height, image.width, len(mode)), np.uint8)
    rows = max(1, _STRIP_PIXELS // max(1, image.width))
    for top in range(0, image.height, rows):
        bottom = min(image.height, top + rows)
        strip = eight_bits(image.crop((0, top, image.width, bottom))).convert(mode)
        found[top:bottom] = np.asarray(strip).reshape(bottom - top, image.width, -1)
    return found


def _content(pixels: NDArray[np.uint8]) -> bytes | memoryview:
    """The bytes of an array; for a large array, a view instead of a copy."""
    return pixels.data.cast("B") if pixels.nbytes > LARGE_BYTES else pixels.tobytes()
