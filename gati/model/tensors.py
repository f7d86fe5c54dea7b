"""Inputs that are arrays of numbers, held in memory and packed (see `gati.model.inputs`)."""

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
    """Named arrays [N, ...] as the network takes them; several are packed into one.

    `tensors` describes the inputs that the network was explored with; None before exploring. Raises
    `DataError` for arrays that do not match it, differ in length, or are not numeric.
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
        """As `Data.identify`, over the packed inputs."""
        return identities_of(self._packed[index] for index in indices)

    def images(self, indices: Sequence[int] | NDArray[np.integer[Any]] | slice) -> Tensor:
        """The inputs at `indices`, packed [n, ...], int64 or float32."""
        picked = indices if isinstance(indices, slice) else np.asarray(indices, dtype=np.int64)
        return torch.from_numpy(self._packed[picked].copy())


def is_whole(item: Any) -> bool:
    """Whether an item holds integers other than pixels (uint8), such as token ids."""
    if not isinstance(item, (Tensor, np.ndarray)):
        return False
    kind = np.asarray(item).dtype
    return kind.kind in "biu" and kind != np.uint8
