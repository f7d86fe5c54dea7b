"""Inputs that are arrays of numbers, held in memory and packed as `gati.model.inputs` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.model.identity import Identities, identities_of
from gati.model.inputs import TensorInputs
from gati.model.sequence import Data, check_labels, fingerprint_of

__all__ = ["TensorData", "is_whole"]


class TensorData(Data):
    """Arrays [N, ...] by name, as the network takes them; packed where they are several.

    `tensors` is what a network was explored with, None before. Raises `DataError` for arrays that do not fit
    it, that differ in number, or that hold no numbers.
    """

    is_images = False

    def __init__(
        self,
        name: str,
        arrays: Mapping[str, NDArray[Any]],
        labels: NDArray[Any] | None,
        tensors: TensorInputs | None,
        where: str,
    ) -> None:
        self.tensors = TensorInputs.of(arrays, where) if tensors is None else tensors
        self._packed = self.tensors.pack(arrays, where)
        self._labels = None if labels is None else check_labels(labels, len(self._packed), where)
        self.name = name

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """As `Data.labels`."""
        return self._labels

    @cached_property
    def fingerprint(self) -> str:
        """As `Data.fingerprint`."""
        return fingerprint_of(self._packed, self._labels)

    def identify(self, indices: NDArray[np.int64]) -> Identities:
        """As `Data.identify`, of what is packed."""
        return identities_of(self._packed[index] for index in indices)

    def images(self, indices: Sequence[int] | NDArray[np.integer[Any]] | slice) -> Tensor:
        """The inputs at `indices`, packed [n, ...], int64 or float32."""
        picked = indices if isinstance(indices, slice) else np.asarray(indices, dtype=np.int64)
        return torch.from_numpy(self._packed[picked].copy())


def is_whole(item: Any) -> bool:
    """Whether an item is whole numbers that are no pixels, such as ids of tokens."""
    if not isinstance(item, (Tensor, np.ndarray)):
        return False
    kind = np.asarray(item).dtype
    return kind.kind in "biu" and kind != np.uint8
