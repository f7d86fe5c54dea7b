"""Seeded augmentation of training inputs, kept to what the base model itself takes for the same thing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Augmentation", "choose_augmentation"]

_SAME_CLASS_SHARE = 0.75  # of inputs that must keep their class for a transformation to be harmless


class Augmentation(NamedTuple):
    """Which transformations are drawn. Labels are never needed: the base model answers what it is shown."""

    flip: bool = False
    shift_pixels: int = 0

    def __call__(self, images: Tensor, generator: np.random.Generator) -> Tensor:
        """Transform a batch [B, C, H, W]; the same generator state gives the same batch."""
        batch = images.shape[0]
        if self.flip:
            flipped = torch.from_numpy(generator.random(batch) < 0.5).view(-1, 1, 1, 1)
            images = torch.where(flipped, images.flip(3), images)
        if self.shift_pixels:
            images = _shift(images, generator, self.shift_pixels)
        return images


def _shift(images: Tensor, generator: np.random.Generator, pixels: int) -> Tensor:
    batch, _, height, width = images.shape
    padded = F.pad(images, (pixels,) * 4)
    tops = generator.integers(0, 2 * pixels + 1, batch)
    lefts = generator.integers(0, 2 * pixels + 1, batch)
    rows = torch.from_numpy(tops[:, None] + np.arange(height))  # (B, H)
    columns = torch.from_numpy(lefts[:, None] + np.arange(width))  # (B, W)
    index = torch.arange(batch)
    return padded.permute(0, 2, 3, 1)[index[:, None, None], rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )


@torch.inference_mode()
def choose_augmentation(module: nn.Module, images: Tensor) -> Augmentation:
    """Keep the transformations under which the base model mostly gives the same class.

    A mirrored cat is a cat; a mirrored 3 is no digit. `images` is a sample [B, C, H, W] on its device.
    """
    if images.dim() != 4 or images.shape[0] < 16:
        return Augmentation()
    base_class = module(images).argmax(1)
    keeps_flip = bool((module(images.flip(3)).argmax(1) == base_class).float().mean() >= _SAME_CLASS_SHARE)
    pixels = min(images.shape[2], images.shape[3]) // 8
    shifted = _shift(images.cpu(), np.random.default_rng(0), pixels).to(images.device) if pixels else images
    keeps_shift = bool((module(shifted).argmax(1) == base_class).float().mean() >= _SAME_CLASS_SHARE)
    return Augmentation(keeps_flip, pixels if keeps_shift else 0)
