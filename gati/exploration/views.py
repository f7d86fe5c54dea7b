"""Views of the training inputs: each step's batch, drawn from (seed, step) alone.

Views come round again: an epoch shows the views of one of a few rounds, and after the last round the first
follows. What the base model answers to a view needs computing only once then, and it is half of the cost of
training a small network. Epochs of the same round show the same batches in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gati.exploration.augment import Augmentation

_ORDER, _DRAWS, _TURN = 1, 2, 3  # streams of random numbers of a seed


class InputSource(Protocol):
    """What training needs of a data set."""

    def __len__(self) -> int: ...

    def images(self, indices: npt.NDArray[np.int64]) -> Tensor:
        """Preprocessed inputs [n, ...] of those indices."""


@dataclass(frozen=True)
class Views:
    """How inputs are changed, and how many rounds of views there are.

    In a share `mixed` of the batches each input is mixed with another one of the batch: two in three of these
    get a rectangle of the other (CutMix, Yun et al. 2019), the third is faded into it (mixup, Zhang et al.
    2018). Nothing says what a mixture is but the base model's answer to it. Whole numbers, such as tokens,
    are not mixed.
    """

    augmentation: Augmentation = Augmentation()
    mixed: float = 0.0
    rounds: int | None = None  # None: no view ever comes round again


class Shown(NamedTuple):
    """Inputs [B, ...] as they are shown, and whether they are mixtures."""

    images: Tensor
    mixed: bool


class ViewedBatch(NamedTuple):
    """Which batch a step shows: `place` counts through the batches of a round."""

    round: int
    place: int


class Viewer:
    """Batches of `batch_size` inputs under `views`; the remainder at the end of a round is dropped."""

    def __init__(self, inputs: InputSource, views: Views, batch_size: int, seed: int) -> None:
        self.inputs, self.views, self.batch_size, self.seed = inputs, views, batch_size, seed
        self.places = max(1, len(inputs) // batch_size)

    def batch(self, step: int) -> ViewedBatch:
        """Return which batch is shown in a step, counted from 0."""
        epoch, position = divmod(step, self.places)
        rounds = self.views.rounds
        if rounds is None or epoch < rounds:
            return ViewedBatch(epoch, position)
        order = np.random.default_rng((self.seed, _TURN, epoch)).permutation(self.places)
        return ViewedBatch(epoch % rounds, int(order[position]))

    def show(self, batch: ViewedBatch) -> Shown:
        """Return the inputs of a batch, changed and mixed, on the CPU."""
        order = np.random.default_rng((self.seed, _ORDER, batch.round)).permutation(len(self.inputs))
        indices = order[batch.place * self.batch_size : (batch.place + 1) * self.batch_size]
        generator = np.random.default_rng((self.seed, _DRAWS, batch.round, batch.place))
        images = self.views.augmentation(self.inputs.images(np.sort(indices)), generator)
        if not images.is_floating_point() or generator.random() >= self.views.mixed:
            return Shown(images, mixed=False)
        return Shown(_mix(images, generator), mixed=True)


def _mix(images: Tensor, generator: np.random.Generator) -> Tensor:
    """Mix each row with another one of the batch."""
    count = images.shape[0]
    other = images[torch.from_numpy(generator.permutation(count))]
    share = generator.random(count).astype(np.float32)
    if images.dim() != 4 or generator.random() < 1 / 3:
        return torch.lerp(images, other, torch.from_numpy(share).view(-1, *[1] * (images.dim() - 1)))
    pasted = _rectangles(share, images.shape[2], images.shape[3], generator)
    return torch.where(torch.from_numpy(pasted)[:, None], other, images)


def _rectangles(
    share: npt.NDArray[np.float32], height: int, width: int, generator: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Masks [B, H, W] of a rectangle each that covers about `share` of the map, cut off at the margins."""

    def inside(length: int) -> npt.NDArray[np.bool_]:
        half = np.sqrt(share) * length / 2
        centre = generator.uniform(0, length, len(share))
        pixels = np.arange(length) + 0.5
        found: npt.NDArray[np.bool_] = np.abs(pixels - centre[:, None]) < half[:, None]
        return found

    return inside(height)[:, :, None] & inside(width)[:, None, :]
