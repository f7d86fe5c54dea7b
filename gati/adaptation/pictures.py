"""Converts pictures of a stream to inputs of a network."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from gati.errors import DataError
from gati.model.preprocess import Preprocessing
from gati.video.frames import Frame, Region

_ROUNDS = 100_000


class PictureInputs:
    """Cuts the regions out of pictures, and prepares them as inputs [1, C, h, w] of one network.

    Regions are stretched to the input size, unless the network's own preprocessing says how to resize.
    """

    def __init__(
        self, preprocessing: Preprocessing, input_shape: Sequence[int], regions: Sequence[Region] = ()
    ) -> None:
        if len(input_shape) != 3:
            raise DataError(f"the network takes inputs of shape {list(input_shape)}, which are not images")
        _, height, width = input_shape
        chosen = preprocessing
        if chosen.channels not in (1, 3):
            raise DataError(f"pictures have 1 or 3 channels, the network takes {chosen.channels}")
        if chosen.size is None and chosen.resize is None:
            chosen = replace(chosen, size=(height, width), crop=None)
        self._preprocessing = chosen
        self.regions: tuple[Region | None, ...] = tuple(regions) or (None,)
        self._size: tuple[int, int] | None = None  # width and height of the picture that regions are parts of

    def fitted(self, frame: Frame) -> Frame:
        """The picture in the size of the first one, if there are regions: cameras change their resolution."""
        if self.regions == (None,):
            return frame
        size = frame.width, frame.height
        self._size = self._size or size
        if size == self._size:
            return frame
        return replace(
            frame, image=np.array(Image.fromarray(frame.image).resize(self._size, Image.Resampling.BILINEAR))
        )

    def inputs(self, frame: Frame) -> list[tuple[Region | None, Tensor]]:
        """The input of each region of a fitted picture, or of all. VideoError for regions outside it."""
        found: list[tuple[Region | None, Tensor]] = []
        for region in self.regions:
            image = frame.image if region is None else region.crop(frame)
            found.append((region, self._preprocessing(self._coloured(image)[None])))
        return found

    def _coloured(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self._preprocessing.channels == 3:
            return image
        return np.array(Image.fromarray(image).convert("L"))[..., None]


def origin_of(source: str, regions: Sequence[Region] = ()) -> str:
    """A digest of what a stream shows: its source, as `open_source` takes it, and the regions."""
    if "://" in source:
        where = source.strip()
    else:
        reader = "opencv:" if source.startswith("opencv:") else ""
        path = Path(source.removeprefix(reader))
        where = f"{reader}{path.resolve()}" if path.exists() else source
    named = "\n".join([where, *sorted({str(region) for region in regions})]).encode(errors="surrogateescape")
    # An address may hold a password, and of a fast digest it could be guessed.
    return hashlib.pbkdf2_hmac("sha256", named, b"gati origin", _ROUNDS).hex()[:24]


def place_of(frame: Frame, region: Region | None) -> str:
    """The name of the place that a region of a source's pictures shows."""
    return frame.source if region is None else f"{frame.source} {region}"
