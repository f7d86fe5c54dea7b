"""Seeded augmentation of training inputs, limited to changes under which the base model keeps its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gati.exploration.memory import fitting_by, in_batches
from gati.exploration.state import RunState
from gati.model.sequence import Data

_SAME_CLASS_SHARE = 0.75  # of inputs that must keep their class for a transformation to be harmless
_LEAST_SIDES = (0.6, 0.75, 0.85)  # of a crop, strongest first
_LIGHTS = (0.4, 0.25, 0.1)  # strongest first


class Augmentation(NamedTuple):
    """Which transformations are drawn. Labels are never needed: the base model answers augmented inputs."""

    flip: bool = False
    shift_pixels: int = 0
    least_side: float = (
        1.0  # smallest side of a crop, as a share of the input's; crops are enlarged to full size
    )
    light: float = 0.0  # largest change of brightness, contrast and colour balance, in standard deviations

    def __call__(self, images: Tensor, generator: np.random.Generator) -> Tensor:
        """Transform a batch [B, C, H, W] where it is; the same generator state gives the same batch."""
        batch = images.shape[0]
        if self.flip:
            flipped = on_device_of(images, generator.random(batch) < 0.5).view(-1, 1, 1, 1)
            images = torch.where(flipped, images.flip(3), images)
        if self.shift_pixels:
            images = _shift(images, generator, self.shift_pixels)
        if self.least_side < 1:
            images = _crop(images, generator, self.least_side)
        if self.light:
            images = _relight(images, generator, self.light)
        return images

    def plain(self) -> Augmentation:
        """The same without crops and changes of light."""
        return self._replace(least_side=1.0, light=0.0)


def on_device_of(images: Tensor, values: npt.NDArray[Any]) -> Tensor:
    """`values` as a tensor on the device of `images`."""
    return torch.from_numpy(values).to(images.device)


def _shift(images: Tensor, generator: np.random.Generator, pixels: int) -> Tensor:
    batch, _, height, width = images.shape
    padded = F.pad(images, (pixels,) * 4)
    tops = generator.integers(0, 2 * pixels + 1, batch)
    lefts = generator.integers(0, 2 * pixels + 1, batch)
    rows = on_device_of(images, tops[:, None] + np.arange(height))  # (B, H)
    columns = on_device_of(images, lefts[:, None] + np.arange(width))  # (B, W)
    index = torch.arange(batch, device=images.device)
    return padded.permute(0, 2, 3, 1)[index[:, None, None], rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )


def _crop(images: Tensor, generator: np.random.Generator, least_side: float) -> Tensor:
    """Crop a random part of half of the inputs, and enlarge it to full size."""
    batch = images.shape[0]
    sides = np.where(generator.random(batch) < 0.5, generator.uniform(least_side, 1, batch), 1.0)
    centres = generator.uniform(-1, 1, (batch, 2)) * (1 - sides)[:, None]
    maps = np.zeros((batch, 2, 3), np.float32)
    maps[:, 0, 0], maps[:, 1, 1], maps[:, :, 2] = sides, sides, centres
    places = F.affine_grid(on_device_of(images, maps), list(images.shape), align_corners=False)
    return F.grid_sample(images, places, mode="bilinear", padding_mode="border", align_corners=False)


def _relight(images: Tensor, generator: np.random.Generator, light: float) -> Tensor:
    """Change the contrast around each input's mean, the brightness, and the balance of the channels."""
    batch, channels = images.shape[:2]
    contrast = on_device_of(
        images, generator.uniform(1 - light, 1 + light, (batch, 1, 1, 1)).astype(np.float32)
    )
    added = (
        generator.uniform(-light, light, (batch, 1)) + generator.uniform(-light, light, (batch, channels)) / 2
    )
    deviation = images.flatten(1).std(1).view(-1, 1, 1, 1)
    brightness = on_device_of(images, added.astype(np.float32)).view(batch, channels, 1, 1)
    mean = images.mean((1, 2, 3), keepdim=True)
    return torch.addcmul(mean + brightness * deviation, images - mean, contrast)


@torch.inference_mode()
def choose_augmentation(module: nn.Module, images: Tensor) -> Augmentation:
    """Choose the transformations under which the base model mostly keeps its class.

    A mirrored cat is a cat, but a mirrored 3 is not a digit. Of crops and changes of light, it is the
    strongest that does no harm. `images` is a sample [B, C, H, W] on the base model's device.
    """
    if images.dim() != 4 or images.shape[0] < 16:
        return Augmentation()
    classes = _answering(module, images)
    base_class = classes(images)

    def harmless(augmentation: Augmentation) -> bool:
        shown = augmentation(images, np.random.default_rng(0))
        changed = ((shown - images).abs() > 1e-3 * images.std()).flatten(1).any(1)
        same = (classes(shown) == base_class)[changed]
        return bool(same.float().mean() >= _SAME_CLASS_SHARE)

    flip = bool((classes(images.flip(3)) == base_class).float().mean() >= _SAME_CLASS_SHARE)
    pixels = min(images.shape[2], images.shape[3]) // 8
    shift = pixels if pixels and harmless(Augmentation(shift_pixels=pixels)) else 0
    sides = (side for side in _LEAST_SIDES if harmless(Augmentation(least_side=side)))
    lights = (light for light in _LIGHTS if harmless(Augmentation(light=light)))
    return Augmentation(flip, shift, next(sides, 1.0), next(lights, 0.0))


def _answering(module: nn.Module, like: Tensor) -> Callable[[Tensor], Tensor]:
    """What tells the classes [B] of inputs such as `like` [B, ...], as many at a time as memory holds."""

    def classes(images: Tensor, most: int) -> Tensor:
        # indexing copies: the network may change its input in place
        return torch.cat(
            list(in_batches(len(images), most, lambda rows: module(images[torch.from_numpy(rows)]).argmax(1)))
        )

    most = fitting_by(lambda rows: classes(like[: len(rows)], len(rows)), like[:1], len(like))
    return lambda images: classes(images, most)


def choose_augmentations(
    train: Data, module: nn.Module, device: torch.device, state: RunState, most: int
) -> tuple[Augmentation, Augmentation]:
    """The augmentations for exits and for students; none if the training inputs are not images.

    They are tried on at most `most` inputs; on less than 16, there are none. A resumed run has the same.
    """
    if not train.is_images or not most:
        return Augmentation(), Augmentation()
    stored = state.costs() or {}
    if "augmentation" in stored:
        bold = Augmentation(*stored["augmentation"])
    else:
        # those of a folder are sorted by class, and a mirrored 0 is a 0
        tried = np.random.default_rng(0).permutation(len(train))[:most]
        sample = train.images(np.sort(tried)).to(device)
        bold = choose_augmentation(module, sample)
        state.write_costs({**stored, "augmentation": bold})
    return bold.plain(), bold
