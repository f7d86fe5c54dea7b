"""Preprocessing: from stored images to the tensor that the network expects.

Data flow: **uint8 [N, H, W, C]** -> resize -> centre crop -> /255 -> (x - mean) / std
-> **float32 [N, C, h, w]**.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from gati.errors import DataError, ModelError, one_line
from gati.model.depth import eight_bits
from gati.model.inputs import TensorInputs
from gati.model.sound import LogMel
from gati.model.text import TextTokens

if TYPE_CHECKING:
    from PIL.Image import Image

INTERPOLATIONS = ("bilinear", "bicubic", "nearest")

_LONG = 8  # images of a larger aspect ratio are cropped before they are resized
_MARGIN = 3  # squares of the shorter side that are kept beyond those that the crop sees
_MOST_PIXELS = 2**22  # after upscaling


@dataclass(frozen=True)
class Preprocessing:
    """How images (or recordings, or text) become the network's input.

    `mean` and `std` have one value per channel and apply after division by 255. `resize` is the length in
    pixels of the shorter side, keeping the aspect ratio; `crop` the side of the centre square taken after
    that; `size` (height, width) stretches to exactly that size before both. None skips a step. Half
    a pixel of the margin at the top or left is rounded to even, as in torchvision, or, if `crop_rounds_down`,
    down, as in transformers. With `tensors` the network takes those arrays unchanged instead of images. With
    `sound` it takes recordings, and `mean` and `std` apply to their spectrograms, 0 to 1. With `text` a
    tokenizer makes `tensors` from text. `lengths` are the lengths at which sequences are executed, each with
    its share of the explored inputs; empty if all are executed as they come. `unknown`: how images become the
    network's input is not known, as all inputs came as tensors, or its image processor does what is not
    possible here.
    """

    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    resize: int | None = None
    crop: int | None = None
    interpolation: str = "bilinear"
    channels: int = 3
    size: tuple[int, int] | None = None
    tensors: TensorInputs | None = None
    sound: LogMel | None = None
    text: TextTokens | None = None
    lengths: tuple[tuple[int, float], ...] = ()
    unknown: bool = False
    crop_rounds_down: bool = False

    def __post_init__(self) -> None:
        """Check the values. Raises `ModelError`."""
        if self.channels < 1:
            raise ModelError(f"preprocessing has {self.channels} channels; give 1 (grey) or 3 (colour)")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                raise ModelError(
                    f"preprocessing has {len(values)} values for {name} and the network takes "
                    f"{self.channels} channels; give {self.channels} values"
                )
            if not all(np.isfinite(values)):
                raise ModelError(f"preprocessing {name} is {list(values)}; give finite numbers")
        if min(self.std) <= 0:
            raise ModelError(f"preprocessing std is {list(self.std)}; every value must be above 0")
        for name, pixels in (("resize", self.resize), ("crop", self.crop)):
            if pixels is not None and pixels < 1:
                raise ModelError(f"preprocessing {name} is {pixels}; give a number of pixels above 0")
        if self.sound is not None and self.channels != 1:
            raise ModelError(f"a spectrogram has 1 channel and the network takes {self.channels}; give 1")
        if self.interpolation not in INTERPOLATIONS:
            raise ModelError(
                f"unknown interpolation {self.interpolation!r}; choose one of {', '.join(INTERPOLATIONS)}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; `from_json` reads them back unchanged."""
        plain = asdict(replace(self, tensors=None, text=None, lengths=()))
        del plain["tensors"], plain["text"], plain["lengths"]  # not in older libraries, nor for images
        if self.tensors is not None:
            plain["tensors"] = self.tensors.to_json()
        if self.text is not None:
            plain["text"] = self.text.to_json()
        if self.lengths:
            plain["lengths"] = [list(each) for each in self.lengths]
        if self.sound is None:
            del plain["sound"]
        for name in ("unknown", "crop_rounds_down"):
            if not plain[name]:
                del plain[name]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], folder: Path | None = None) -> Preprocessing:
        """Read what `to_json` wrote; a tokenizer is in `folder`."""
        size, sound = values["size"], values.get("sound")
        return cls(
            mean=tuple(float(value) for value in values["mean"]),
            std=tuple(float(value) for value in values["std"]),
            resize=values["resize"],
            crop=values["crop"],
            interpolation=str(values["interpolation"]),
            channels=int(values["channels"]),
            size=None if size is None else (int(size[0]), int(size[1])),
            tensors=TensorInputs.from_json(values["tensors"]) if "tensors" in values else None,
            sound=None if sound is None else LogMel.from_json(sound),
            text=TextTokens.from_json(values["text"], folder) if "text" in values else None,
            lengths=tuple((int(length), float(share)) for length, share in values.get("lengths", ())),
            unknown=bool(values.get("unknown", False)),
            crop_rounds_down=bool(values.get("crop_rounds_down", False)),
        )

    def __call__(self, images: NDArray[np.uint8]) -> Tensor:
        """Turn images uint8 [N, H, W, C] into the network's input, float32 [N, C, h, w].

        **Raises:** `DataError` for another rank, dtype or channel count, images smaller than the crop, or of
        such an aspect ratio that resizing them would exhaust the memory.
        """
        return self.scaled(self.fitted(images))

    def fitted(self, images: NDArray[np.uint8]) -> Tensor:
        """Resize and crop images uint8 [N, H, W, C] to uint8 [N, C, h, w]. Raises as `__call__`."""
        self.check_images()
        check_image_array(images, self.channels)
        own = np.require(images, requirements=("C", "W"))  # torch warns of memory that it may not write to
        pixels = torch.from_numpy(own).permute(0, 3, 1, 2)  # uint8 [N, C, H, W]
        return self._crop(self._resize(self._middle(pixels)))

    def scaled(self, pixels: Tensor) -> Tensor:
        """Normalise what `fitted` returned, uint8 [N, C, h, w], to the network's input, float32."""
        values = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        mean, std = _channelwise(self.mean, pixels.device), _channelwise(self.std, pixels.device)
        return values.div_(255.0).sub_(mean).div_(std)

    def from_waves(self, waves: Tensor) -> Tensor:
        """Turn recordings float32 [N, samples] into the network's input, float32 [N, 1, mels, frames].

        **Raises:** `DataError` for a network without a spectrogram front end.
        """
        if self.sound is None:
            raise DataError("the network has no spectrogram front end; give --sample-rate and --seconds")
        return (self.sound(waves) - self.mean[0]) / self.std[0]

    def from_texts(self, texts: Sequence[str], what: str = "the request") -> Tensor:
        """Turn texts into the network's input, packed int64 [N, ...]; `what` begins the messages.

        **Raises:** `DataError` for empty texts, or a network without a tokenizer.
        """
        if self.text is None or self.tensors is None:
            raise DataError(f"{what}: the network takes no text; explore it with --tokenizer FILE")
        arrays = self.text.encode(texts, what, self.text.length)
        return self.from_arrays(arrays, what)

    def from_arrays(self, arrays: Mapping[str, Any], what: str = "the input") -> Tensor:
        """Turn arrays [N, ...], named as the network's arguments, into its input [N, ...], packed if several.

        Without a copy if there is one of the right type. `what` begins the messages.

        **Raises:** `DataError` for arrays unlike those explored with, or a network that takes no arrays.
        """
        if self.tensors is None:
            raise DataError(f"{what}: the network takes no named arrays; give what it was explored with")
        try:
            taken = {name: np.asarray(each) for name, each in arrays.items()}
        except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; tensors with gradients
            raise DataError(
                f"{what} is not numeric arrays ({one_line(error)}); pad and convert it"
            ) from error
        packed = self.tensors.pack(taken, what)
        return torch.from_numpy(np.require(packed, requirements="W"))  # torch warns of read-only memory

    def padded(self, packed: NDArray[Any]) -> NDArray[Any]:
        """Pad sequences [N, arrays, length] to the longest length; other arrays are returned unchanged.

        Nothing is padded if `lengths` is empty: padding might then change an answer.
        """
        short = self.lengths[-1][0] - packed.shape[2] if self.lengths and packed.ndim == 3 else 0
        return np.pad(packed, ((0, 0), (0, 0), (0, short))) if short > 0 else packed

    def from_pil(self, images: Sequence[Image]) -> Tensor:
        """Turn Pillow images into the network's input, float32 [N, C, h, w].

        **Raises:** `DataError` if they differ in size after resizing.
        """
        return join([self(self.pixels(image)[None]) for image in images])

    def pixels(self, image: Image) -> NDArray[np.uint8]:
        """Convert a Pillow image to uint8 [H, W, C] with the network's channels, without resizing.

        **Raises:** `DataError` if images cannot have this number of channels, and as `eight_bits`.
        """
        self.check_images()
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(self.channels)
        if mode is None:
            raise DataError(f"image files cannot hold {self.channels} channels; give an .npz or a dataset")
        return np.array(eight_bits(image).convert(mode), dtype=np.uint8).reshape(
            image.height, image.width, -1
        )

    def check_images(self) -> None:
        """Raise `DataError` if the network takes something else, or how to prepare images is not known."""
        if self.tensors is not None:
            raise DataError(
                f"this network takes {self.tensors.described()}, not images; give those arrays in an .npz"
            )
        if self.sound is not None:
            raise DataError(
                "the network takes audio; give recordings, or spectrograms made like those of its front end"
            )
        if self.unknown:
            raise DataError(
                "this network was explored with preprocessed tensors, or its image processor has no equal in "
                "Gati, so how to prepare images is not known: give such tensors, or explore it with --mean, "
                "--std and --resize"
            )

    def _middle(self, pixels: Tensor) -> Tensor:
        """The part of a long image that the centre crop can see, so that the rest is never resized.

        An even number of squares of the shorter side is cut at both ends, which keeps the resampling grid.
        """
        if self.size is not None or self.resize is None or self.crop is None:
            return pixels
        shorter, longer = sorted(pixels.shape[2:])
        if longer <= _LONG * shorter:
            return pixels
        needed = math.ceil(self.crop / self.resize) + _MARGIN
        skipped = max(0, (longer // shorter - needed) // 2) // 2 * 2 * shorter
        dimension = 2 if pixels.shape[2] == longer else 3
        return pixels.narrow(dimension, skipped, longer - 2 * skipped)

    def _resize(self, pixels: Tensor) -> Tensor:
        if self.size is not None:
            pixels = self._interpolate(pixels, *self.size)
        if self.resize is None:
            return pixels
        height, width = pixels.shape[2:]
        shorter = min(height, width)
        new_height, new_width = height * self.resize // shorter, width * self.resize // shorter
        if new_height * new_width > max(_MOST_PIXELS, height * width):
            raise DataError(
                f"images of {height}x{width} pixels would be resized to {new_height}x{new_width}; "
                "give images of a smaller aspect ratio"
            )
        return self._interpolate(pixels, new_height, new_width)

    def _interpolate(self, pixels: Tensor, height: int, width: int) -> Tensor:
        if (height, width) == tuple(pixels.shape[2:]):
            return pixels
        # Antialiasing on uint8 rounds like Pillow, with which published accuracies were measured.
        smooth = self.interpolation != "nearest"
        return functional.interpolate(pixels, (height, width), mode=self.interpolation, antialias=smooth)

    def _crop(self, pixels: Tensor) -> Tensor:
        if self.crop is None:
            return pixels
        height, width = pixels.shape[2:]
        if min(height, width) < self.crop:
            raise DataError(
                f"images of {height}x{width} pixels are smaller than the network's crop of {self.crop}; "
                f"give --resize {self.crop} or larger images"
            )
        margins = (height - self.crop, width - self.crop)
        top, left = (each // 2 if self.crop_rounds_down else round(each / 2) for each in margins)
        return pixels[:, :, top : top + self.crop, left : left + self.crop]


@lru_cache(maxsize=64)
def _channelwise(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Values [C] as float32 [1, C, 1, 1], whatever the program's default dtype and device are."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate preprocessed images [n, C, h, w]. Raises `DataError` if they differ in size."""
    shapes = sorted({tuple(tensor.shape[2:]) for tensor in tensors})
    if len(shapes) > 1:
        (height, width), (other_height, other_width) = shapes[0], shapes[-1]
        raise DataError(
            f"images differ in size ({height}x{width} and {other_height}x{other_width} pixels) and the "
            "network has no preset size; give --resize PIXELS"
        )
    return torch.cat(list(tensors))


def check_image_array(images: NDArray[Any], channels: int, what: str = "images") -> None:
    """Check that `images` is an array uint8 [N, H, W, channels]. Raises `DataError`."""
    if not isinstance(images, np.ndarray):
        raise DataError(f"{what} are of type {type(images).__name__}; give a NumPy array uint8 [N, H, W, C]")
    shape = list(images.shape)
    if images.ndim != 4:
        raise DataError(f"{what} have shape {shape}; give uint8 [N, H, W, C], or [N, H, W] for grey images")
    if images.dtype != np.uint8:
        raise DataError(
            f"{what} have dtype {images.dtype}; give uint8 values 0-255 in the shape [N, H, W, C]"
        )
    if images.shape[3] != channels:
        hint = "; transpose [N, C, H, W] to [N, H, W, C]" if images.shape[1] == channels else ""
        raise DataError(
            f"{what} have {images.shape[3]} channels (shape {shape}) and the network takes {channels}"
            f"{hint or '; convert them'}"
        )
    if 0 in images.shape[1:]:
        raise DataError(f"{what} have shape {shape}: no pixels; give images of at least 1x1 pixels")
