"""Inputs that are arrays of numbers, held in memory and packed (see `gati.model.inputs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.model.inputs import TensorInputs
from gati.model.sequence import HeldData


class TensorData(HeldData):
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
        self.tensors = tensors or TensorInputs.of(arrays, where).with_ranges(arrays)
        super().__init__(name, self.tensors.pack(arrays, where), labels, where)

    def _prepared(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values.copy())  # packed, int64 or float32


def is_whole(item: Any) -> bool:
    """Whether an item holds integers other than pixels (uint8), such as token ids."""
    if not isinstance(item, (Tensor, np.ndarray)):
        return False
    kind = np.asarray(item).dtype
    return kind.kind in "biu" and kind != np.uint8
