"""Arrays of images or other inputs in an `.npz`."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import DataError
from gati.files import is_file

_DAMAGED = (
    OSError,
    ValueError,
    TypeError,  # an .npy by this name is no archive
    EOFError,
    RuntimeError,
    zlib.error,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
)
_NOT_INPUTS = ("labels", "class_names")


def read_npz(path: Path, what: str) -> dict[str, NDArray[Any]]:
    """Read `images`, or else all other arrays, with `labels` and `class_names`; pass over what is no array.

    **Raises:** `DataError`.
    """
    if not is_file(path):
        raise DataError(f"{what}: no file {path}; check the path")
    try:
        with np.load(path, allow_pickle=False) as archive:
            keys = ["images", *_NOT_INPUTS] if "images" in archive.files else archive.files
            members = {key: archive[key] for key in archive.files if key in keys}
            found = {key: member for key, member in members.items() if isinstance(member, np.ndarray)}
            if not found.keys() - set(_NOT_INPUTS):  # other members, such as texts, are bytes
                listed = ", ".join(archive.files) or "none"
                raise DataError(
                    f"{what}: {path} has no inputs (arrays: {listed}); save `images` uint8 [N, H, W, C], or "
                    "`inputs` or arrays named as the network's arguments [N, ...]"
                )
            return found
    except _DAMAGED as error:
        if zipfile.is_zipfile(path) and "allow_pickle" in str(error):
            raise DataError(
                f"{what}: {path} holds Python objects, which would need unpickling; save numeric arrays"
            ) from error
        raise DataError(
            f"{what}: {path} is not a readable .npz ({type(error).__name__}); write or copy it again"
        ) from error
