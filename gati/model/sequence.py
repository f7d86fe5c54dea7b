"""A sequence of inputs from any source."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gati.errors import DataError
from gati.model.identity import Identities, identities_of
from gati.model.inputs import TensorInputs


class Data(ABC):
    """A sequence of inputs.

    `is_images` is False for preprocessed tensors; `tensors` describes the arrays that inputs are packed from,
    if any. `note` says what was left out, or is empty.
    """

    name: str
    is_images: bool = True
    tensors: TensorInputs | None = None
    class_names: tuple[str, ...] | None = None
    note: str = ""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of inputs."""

    @property
    @abstractmethod
    def labels(self) -> NDArray[np.int64] | None:
        """Return the labels int64 [N], or None."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Return a sha256 of the content, by which two runs can tell whether they saw the same data."""

    @cached_property
    def identities(self) -> Identities:
        """A hash of each input, uint64 [N], independent of labels and names; reads every input once."""
        return self.identify(np.arange(len(self)))

    @abstractmethod
    def identify(self, indices: NDArray[np.int64]) -> Identities:
        """Return the identities of the inputs at `indices`, uint64 [n]."""

    @abstractmethod
    def images(self, indices: Sequence[int] | NDArray[np.integer[Any]] | slice) -> Tensor:
        """Return the inputs at `indices`, preprocessed: float32 [n, ...], or int64 for integer arrays.

        **Raises:** `DataError`.
        """

    def keep(self, limit_bytes: int) -> None:  # noqa: B027 - what is in memory needs no copy
        """Keep what is read and decoded, up to `limit_bytes`, for repeated reading."""

    def subset(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> Data:
        """Return a view of the inputs at `indices`, in that order."""
        return _Subset(self, np.asarray(indices, dtype=np.int64))


class HeldData(Data):
    """Inputs [N, ...] in memory. A subclass turns some of them into the network's input.

    Raises `DataError` for invalid labels; `where` begins its messages.
    """

    def __init__(self, name: str, values: NDArray[Any], labels: NDArray[Any] | None, where: str) -> None:
        self.name, self._values = name, values
        self._labels = None if labels is None else check_labels(labels, len(values), where)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """As `Data.labels`."""
        return self._labels

    @cached_property
    def fingerprint(self) -> str:
        """As `Data.fingerprint`."""
        digest = hashlib.sha256(repr(self._values.shape).encode())
        digest.update(np.ascontiguousarray(self._values).data)
        if self._labels is not None:
            digest.update(self._labels.tobytes())
        return digest.hexdigest()

    def identify(self, indices: NDArray[np.int64]) -> Identities:
        """As `Data.identify`, of the inputs as they are held."""
        return identities_of(self._values[index] for index in indices)

    def images(self, indices: Sequence[int] | NDArray[np.integer[Any]] | slice) -> Tensor:
        """As `Data.images`."""
        picked = indices if isinstance(indices, slice) else np.asarray(indices, dtype=np.int64)
        return self._prepared(self._values[picked])

    @abstractmethod
    def _prepared(self, values: NDArray[Any]) -> Tensor:
        """The network's input [n, ...] from values [n, ...]."""


class _Subset(Data):
    def __init__(self, parent: Data, indices: NDArray[np.int64]) -> None:
        outside = indices[(indices < 0) | (indices >= len(parent))]
        if len(outside):
            raise DataError(f"index {outside[0]} is outside {parent.name} (0 to {len(parent) - 1})")
        self._parent, self._indices = parent, indices
        self.name, self.is_images, self.class_names = parent.name, parent.is_images, parent.class_names
        self.tensors, self.note = parent.tensors, parent.note

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        labels = self._parent.labels
        return None if labels is None else labels[self._indices]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._parent.fingerprint.encode() + self._indices.tobytes()).hexdigest()

    def identify(self, indices: NDArray[np.int64]) -> Identities:
        wanted = self._indices[indices]
        known = "identities" in self._parent.__dict__  # then nothing is read again
        return self._parent.identities[wanted] if known else self._parent.identify(wanted)

    def images(self, indices: Sequence[int] | NDArray[np.integer[Any]] | slice) -> Tensor:
        picked = indices if isinstance(indices, slice) else np.asarray(indices, dtype=np.int64)
        return self._parent.images(self._indices[picked])

    def keep(self, limit_bytes: int) -> None:
        self._parent.keep(limit_bytes)


def check_labels(labels: NDArray[Any], count: int, where: str) -> NDArray[np.int64]:
    """Return labels as int64 [count]; `where` begins the messages. Raises `DataError` for invalid labels."""
    if labels.shape != (count,):
        raise DataError(
            f"{where} has labels of shape {list(labels.shape)} for {count} inputs; give one label per input"
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{where} has labels of dtype {labels.dtype}; give integer class numbers from 0")
    if int(labels.min()) < 0:
        raise DataError(f"{where} has label {int(labels.min())}; give integer class numbers from 0")
    return labels.astype(np.int64)


def listed(indices: Sequence[int] | NDArray[np.integer[Any]] | slice, length: int) -> list[int]:
    """Return indices into a sequence of `length` as a list."""
    if isinstance(indices, slice):
        return list(range(length))[indices]
    return [int(index) for index in indices]
