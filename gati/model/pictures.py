"""Image files: finding them in a folder, and opening untrusted ones. Needs no torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, UnidentifiedImageError

from gati.cores import core_count
from gati.errors import DataError, one_line
from gati.model.depth import eight_bits
from gati.model.identity import Identities, identity_of

if TYPE_CHECKING:
    from gati.model.preprocess import Preprocessing

IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM")  # decoders that may run, whatever the suffix
IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}
)
OTHER_IMAGE_SUFFIXES = frozenset(
    {".tif", ".tiff", ".avif", ".heic", ".heif", ".jp2", ".j2k", ".jxl", ".tga", ".dcm"}
)
_LISTED = 10  # unreadable files that a message names


def open_image(path: Path) -> Image.Image:
    """Decode an image file. Raises `DataError` if it is missing, damaged, too large or unsupported."""
    with _oversized_is_an_error():
        return _decode(path)


def file_identities(paths: Sequence[Path], preprocessing: Preprocessing) -> Identities:
    """Return a hash of each image's pixels, uint64 [n]; decodes on all cores that this process may use.

    **Raises:** `DataError` as `open_image`, naming others like the first.
    """

    def identity(path: Path) -> int | DataError:
        try:
            return identity_of(preprocessing.pixels(_decode(path)))
        except DataError as error:
            return error

    with _oversized_is_an_error(), ThreadPoolExecutor(core_count()) as pool:
        found = list(pool.map(identity, paths))
    wrong = [(path, each) for path, each in zip(paths, found, strict=True) if isinstance(each, DataError)]
    if len(wrong) > 1:
        others = ", ".join(str(path) for path, _ in wrong[1:_LISTED])
        more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise DataError(f"{wrong[0][1]}; so with {others}{more}") from wrong[0][1].__cause__
    if wrong:
        raise wrong[0][1]
    return np.array(found, dtype=np.uint64)


@contextmanager
def _oversized_is_an_error() -> Iterator[None]:
    """Warning filters belong to the process, so all threads share this one.

    Pillow's other warnings are of pictures that it can read, and would come once for each of thousands.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _decode(path: Path) -> Image.Image:
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            image.load()
            if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
                return image.convert("RGBA")  # else Pillow warns when it is converted to other modes
            return eight_bits(image.copy())
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise DataError(f"no image at {path}; check the path") from error
    except PermissionError as error:
        raise DataError(f"cannot read image {path}: {error.strerror}; check its permissions") from error
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
