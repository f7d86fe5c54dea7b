"""Views of the training inputs: the batch of each step depends only on (seed, step).

Views repeat: each epoch shows the views of one of a few rounds, and the first round follows the last one. So
the base model's answer to a view is computed only once, which otherwise is half the cost of training a small
network. Epochs of the same round show the same batches in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gati.exploration.augment import Augmentation, on_device_of

_ORDER, _DRAWS, _TURN = 1, 2, 3  # independent random streams of one seed


class InputSource(Protocol):
    """The part of a data set's interface that training uses."""

    def __len__(self) -> int: ...

    def images(self, indices: npt.NDArray[np.int64]) -> Tensor:
        """The preprocessed inputs [n, ...] at `indices`."""


@dataclass(frozen=True)
class Views:
    """How inputs are changed, and how many rounds of views there are.

    In a share `mixed` of the batches, each input is mixed with another one of the batch. Two thirds of these
    batches paste a rectangle of the other input (CutMix, Yun et al. 2019), one third interpolates between the
    two (mixup, Zhang et al. 2018). The target of a mixture is the base model's answer to it. Integers, such
    as tokens, are not mixed.
    """

    augmentation: Augmentation = Augmentation()
    mixed: float = 0.0
    rounds: int | None = None  # None: views never repeat


class Shown(NamedTuple):
    """Inputs [B, ...] as they are shown, and whether they are mixtures."""

    images: Tensor
    mixed: bool


class ViewedBatch(NamedTuple):
    """Which batch a step shows: batch number `place` of round `round`."""

    round: int
    place: int


class Viewer:
    """Batches of `batch_size` inputs under `views`; the remainder at the end of a round is dropped.

    With `places`, a round has only so many batches.
    """

    def __init__(
        self, inputs: InputSource, views: Views, batch_size: int, seed: int, places: int | None = None
    ) -> None:
        self.inputs, self.views, self.batch_size, self.seed = inputs, views, batch_size, seed
        whole = max(1, len(inputs) // batch_size)
        self.places = whole if places is None else min(places, whole)
        self._last: tuple[int, npt.NDArray[np.int64]] | None = None  # round and its order

    def batch(self, step: int) -> ViewedBatch:
        """Return the batch of a step, counted from 0."""
        epoch, position = divmod(step, self.places)
        rounds = self.views.rounds
        if rounds is None or epoch < rounds:
            return ViewedBatch(epoch, position)
        order = np.random.default_rng((self.seed, _TURN, epoch)).permutation(self.places)
        return ViewedBatch(epoch % rounds, int(order[position]))

    def show(self, batch: ViewedBatch, device: torch.device | None = None) -> Shown:
        """Return the inputs of a batch, changed and mixed, on `device` (the CPU unless given)."""
        indices = self._order(batch.round)[
            batch.place * self.batch_size : (batch.place + 1) * self.batch_size
        ]
        generator = np.random.default_rng((self.seed, _DRAWS, batch.round, batch.place))
        images = self.views.augmentation(self.inputs.images(np.sort(indices)).to(device), generator)
        if not images.is_floating_point() or generator.random() >= self.views.mixed:
            return Shown(images, mixed=False)
        return Shown(_mix(images, generator), mixed=True)

    def _order(self, number: int) -> npt.NDArray[np.int64]:
        """The order of the inputs in a round; that of the last one is kept, since it takes long to draw."""
        if self._last is None or self._last[0] != number:
            order = np.random.default_rng((self.seed, _ORDER, number)).permutation(len(self.inputs))
            self._last = number, order
        return self._last[1]


def _mix(images: Tensor, generator: np.random.Generator) -> Tensor:
    """Mix each input with another one of the batch."""
    count = images.shape[0]
    other = images[on_device_of(images, generator.permutation(count))]
    share = generator.random(count).astype(np.float32)
    if images.dim() != 4 or generator.random() < 1 / 3:
        return torch.lerp(images, other, on_device_of(images, share).view(-1, *[1] * (images.dim() - 1)))
    pasted = _rectangles(share, images.shape[2], images.shape[3], generator)
    return torch.where(on_device_of(images, pasted)[:, None], other, images)


def _rectangles(
    share: npt.NDArray[np.float32], height: int, width: int, generator: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Masks [B, H, W] of one rectangle each, which covers about `share` of the map, clipped at its edges."""

    def inside(length: int) -> npt.NDArray[np.bool_]:
        half = np.sqrt(share) * length / 2
        centre = generator.uniform(0, length, len(share))
        pixels = np.arange(length) + 0.5
        found: npt.NDArray[np.bool_] = np.abs(pixels - centre[:, None]) < half[:, None]
        return found

    return inside(height)[:, :, None] & inside(width)[:, None, :]
