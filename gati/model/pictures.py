"""Image files: finding them in a folder, and opening untrusted ones."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from gati.errors import DataError, one_line
from gati.model.depth import eight_bits
from gati.model.identity import Identities, identity_of
from gati.model.preprocess import Preprocessing

IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM")  # decoders that may run, whatever the suffix
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"})


def open_image(path: Path) -> Image.Image:
    """Decode an image file. Raises `DataError` if it is missing, damaged, too large or unsupported."""
    with _oversized_is_an_error():
        return _decode(path)


def file_identities(paths: Sequence[Path], preprocessing: Preprocessing) -> Identities:
    """Return a hash of each image's pixels, uint64 [n]; decodes on all cores.

    **Raises:** `DataError` as `open_image`.
    """

    def identity(path: Path) -> int:
        return identity_of(preprocessing.pixels(_decode(path)))

    with _oversized_is_an_error(), ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.fromiter(pool.map(identity, paths), dtype=np.uint64, count=len(paths))


@contextmanager
def _oversized_is_an_error() -> Iterator[None]:
    """Warning filters belong to the process, so all threads share this one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _decode(path: Path) -> Image.Image:
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            image.load()
            return eight_bits(image.copy())
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise DataError(f"no image at {path}; check the path") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; give the image files in it, such as {path}/*.png") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(
            f"image {path} has more than {Image.MAX_IMAGE_PIXELS} pixels; give a smaller one"
        ) from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"{path} is not an image of a supported format ({', '.join(IMAGE_FORMATS)}); convert it"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(f"image {path} is damaged ({one_line(error)}); copy it again") from error
