"""Inputs from a `torch.utils.data.Dataset`: images, preprocessed tensors, or arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from gati.errors import DataError, one_line
from gati.model.identity import Identities, identities_of
from gati.model.inputs import ALONE
from gati.model.kept import KeptInputs
from gati.model.preprocess import Preprocessing, check_image_array, join
from gati.model.sequence import Data, check_labels, listed
from gati.model.source import import_object, with_operators
from gati.model.tensors import TensorData, is_whole

_LABELS = ("labels", "label")  # in an item that is a dict: no input of a network that is new
_PROBES = 16  # items; a random flip changes every other one, so fewer could all look fixed


def from_dataset(dataset: Dataset[Any], name: str, preprocessing: Preprocessing, what: str) -> Data:
    """Read images one by one when they are asked for, and items of anything else at once."""
    found = DatasetData(dataset, name, preprocessing, what)
    arrays = found.arrays()
    if arrays is None:
        return found
    whole = TensorData(name, arrays, found.labels, preprocessing.tensors, f"{what}: {name}")
    whole.class_names = found.class_names
    return whole


class DatasetData(Data):
    """A dataset of images or preprocessed tensors, with or without labels.

    **Raises:** `DataError`, also for items that differ from one reading to the next.
    """

    def __init__(self, dataset: Dataset[Any], name: str, preprocessing: Preprocessing, what: str) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(f"{what}: {name} is an iterable dataset; give one with __len__ and __getitem__")
        self._dataset = dataset
        self._what = f"{what}: {name}"
        self._preprocessing = preprocessing
        taken = () if preprocessing.tensors is None else (part.name for part in preprocessing.tensors.parts)
        self._label_names = [name for name in _LABELS if name not in {*taken}]  # older libraries take them
        self._length = _length_of(dataset, self._what)
        if self._length == 0:
            raise DataError(f"{self._what} is empty; give at least a few hundred images")
        self.name = name
        image, label = self._item(0)
        self._as_arrays = isinstance(image, Mapping) or is_whole(image)
        self._has_labels = label is not None
        names = getattr(dataset, "classes", None)  # as torchvision's datasets call them
        if isinstance(names, (list, tuple)) and names and all(isinstance(name, str) for name in names):
            self.class_names = tuple(names)
        self.is_images = not (isinstance(image, Tensor) and image.is_floating_point())
        self._kept = KeptInputs()  # images as uint8 [1, C, h, w], tensors as they are
        self._check_fixed()

    def __len__(self) -> int:
        return self._length

    @cached_property
    def labels(self) -> NDArray[np.int64] | None:
        """As `Data.labels`."""
        if not self._has_labels:
            return None
        for attribute in ("targets", "labels"):  # torchvision's datasets have them without decoding
            known = self._integers(getattr(self._dataset, attribute, None))
            if known is not None and all(_is_number(label, known[at]) for at, label in self._probed.items()):
                return check_labels(known, self._length, self._what)
        try:
            numbers = [_class_number(self._item(index)[1]) for index in range(self._length)]
        except (TypeError, ValueError, OverflowError) as error:  # the last for an infinite one
            raise DataError(
                f"{self._what} has labels that are not numbers ({one_line(error)}); "
                "give integer class numbers from 0"
            ) from error
        return check_labels(np.array(numbers), self._length, self._what)

    def _integers(self, values: Any) -> NDArray[Any] | None:
        """An attribute of the dataset as an array, if it holds one integer per item."""
        try:
            array = np.asarray(values)
        except (ValueError, TypeError, RuntimeError):  # ragged lists, tensors on a GPU
            return None
        fits = array.shape == (self._length,) and np.issubdtype(array.dtype, np.integer)
        return array if fits else None

    @cached_property
    def fingerprint(self) -> str:
        """As `Data.fingerprint`, which reads 16 items."""
        digest = hashlib.sha256(f"{self.name}:{self._length}".encode())
        digest.update(self.images(self._probes()).numpy().tobytes())
        return digest.hexdigest()

    def identify(self, indices: NDArray[np.int64]) -> Identities:
        """As `Data.identify`."""
        return identities_of(self._content(self._item(int(index))[0]) for index in indices)

    def images(self, indices: Sequence[int] | NDArray[np.integer[Any]] | slice) -> Tensor:
        """As `Data.images`."""
        rows = listed(indices, len(self))
        if not self.is_images:
            return self._stack([self._kept.get(index, self._tensor) for index in rows])
        return self._preprocessing.scaled(join([self._kept.get(index, self._pixels) for index in rows]))

    def keep(self, limit_bytes: int) -> None:
        """As `Data.keep`, of what the dataset returns, unless it has that in memory."""
        if not isinstance(self._dataset, TensorDataset):
            self._kept.allow(limit_bytes)

    def _pixels(self, index: int) -> Tensor:
        image = self._content(self._item(index)[0])
        pixels = self._preprocessing.fitted(image[None])
        return pixels.clone(memory_format=torch.contiguous_format)  # the dataset may overwrite its own

    def _tensor(self, index: int) -> Tensor:
        """An item that the dataset cannot overwrite later."""
        item = self._item(index)[0]
        if not isinstance(item, Tensor):
            raise DataError(
                f"{self._what}: items differ (item {index} is a {type(item).__name__}, others are tensors); "
                "return tensors of one dtype and shape"
            )
        return item.clone()

    def arrays(self) -> dict[str, NDArray[Any]] | None:
        """All items as named arrays [N, ...] if they are dicts or integers, None for images."""
        if not self._as_arrays:
            return None
        try:
            first = _named(self._item(0)[0])
            found = {name: np.empty((self._length, *each.shape), each.dtype) for name, each in first.items()}
            for index in range(self._length):
                item = _named(self._item(index)[0])
                for name, array in found.items():
                    found[name] = _with_row(array, index, item[name])
            return found
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(
                f"{self._what}: items differ ({one_line(error)}); return arrays of the same names and shapes"
            ) from error

    def _probes(self) -> NDArray[np.int64]:
        return np.unique(np.linspace(0, self._length - 1, _PROBES).astype(np.int64))

    def _check_fixed(self) -> None:
        """Read a few items twice: inputs are told apart, and found again, by their content."""
        self._probed: dict[int, Any] = {}  # labels
        for index in self._probes().tolist():
            image, self._probed[index] = self._item(index)
            if not _equal(image, self._item(index)[0]):
                own = "; Gati makes views of its own" if self.is_images else ""
                raise DataError(
                    f"{self._what}: item {index} differs each time it is read: "
                    f"turn off random transforms{own}"
                )

    def _item(self, index: int) -> tuple[Any, Any]:
        try:
            item = self._dataset[index]
        except DataError as error:  # already says what to do
            raise DataError(f"{self._what.partition(':')[0]}: {error}") from error
        except (Exception, SystemExit) as error:
            raise DataError(
                f"{self._what}: reading item {index} failed ({one_line(error)}); fix that dataset"
            ) from error
        image, label = (*item, None)[:2] if isinstance(item, (tuple, list)) and item else (item, None)
        if isinstance(image, Mapping):
            own = next((image[name] for name in self._label_names if name in image), None)
            label = own if label is None else label
            image = {name: each for name, each in image.items() if name not in self._label_names}
        if not isinstance(image, (Tensor, np.ndarray, Image.Image, Mapping)):
            raise DataError(
                f"{self._what}: item {index} holds a {type(image).__name__}; return a tensor, an array, a "
                "dict of those or a Pillow image, alone or with a label"
            )
        return _plain(image), label

    def _content(self, image: Any) -> NDArray[Any]:
        """An item as uint8 [H, W, C], or floating point."""
        if isinstance(image, Image.Image):
            return self._preprocessing.pixels(image)
        if not self.is_images:
            return np.asarray(image, dtype=np.float32)
        pixels = np.asarray(image)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        channels = self._preprocessing.channels
        if isinstance(image, Tensor) and pixels.ndim == 3 and pixels.shape[0] == channels != pixels.shape[2]:
            pixels = pixels.transpose(1, 2, 0)  # torchvision's uint8 tensors are [C, H, W]
        check_image_array(pixels[None], channels, self._what)
        return pixels

    def _stack(self, items: list[Tensor]) -> Tensor:
        shape = tuple(items[0].shape)
        for item in items:
            if tuple(item.shape) != shape or not item.is_floating_point():
                raise DataError(
                    f"{self._what}: items differ (float {list(shape)} and {item.dtype} {list(item.shape)}); "
                    "return tensors of one dtype and shape"
                )
        if len(shape) == 3 and shape[0] != self._preprocessing.channels:
            raise DataError(
                f"{self._what}: tensors have shape {list(shape)} and the network takes "
                f"{self._preprocessing.channels} channels; return float tensors [C, H, W]"
            )
        return torch.stack(items).to(torch.float32)


def _length_of(dataset: Any, what: str) -> int:
    """The number of items. Raises `DataError` if the dataset does not know it."""
    try:
        return len(dataset)
    except (Exception, SystemExit) as error:
        raise DataError(
            f"{what}: its length is not known ({one_line(error)}); give a dataset whose __len__ returns the "
            "number of its items"
        ) from error


def _plain(value: Any) -> Any:
    """Tensors as NumPy can read them: on the CPU, without a gradient, of a type that NumPy has."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach().cpu()
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _named(item: Any) -> dict[str, NDArray[Any]]:
    """The arrays of an item, by name."""
    named = item if isinstance(item, Mapping) else {ALONE: item}
    return {name: np.asarray(each) for name, each in named.items()}


def _with_row(array: NDArray[Any], index: int, row: NDArray[Any]) -> NDArray[Any]:
    """`array` with a copy of a row, of a type that holds both. Raises `ValueError` for another shape."""
    if row.shape != array.shape[1:]:
        raise ValueError(f"shapes {list(array.shape[1:])} and {list(row.shape)}")
    array = array.astype(np.result_type(array, row), copy=False)
    array[index] = row
    return array


def _class_number(label: Any) -> int:
    """A label as an integer. Raises `TypeError` or `ValueError` for what is none, such as 0.7."""
    label = label.item() if isinstance(label, np.ndarray) else label  # which may hold one number
    number = int(label)
    if number != float(label):
        raise ValueError(f"{label} is not whole")
    return number


def _is_number(label: Any, number: Any) -> bool:
    """Whether an item's label is that integer."""
    try:
        return _class_number(label) == int(number)
    except (TypeError, ValueError, OverflowError):
        return False


def _equal(first: Any, second: Any) -> bool:
    """Whether two readings of an item hold the same values, NaN included."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_equal(first[name], second[name]) for name in first)
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        try:
            first, second = np.asarray(first), np.asarray(second)
        except ValueError:  # ragged lists, which are refused when they are stacked
            return True
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def call_dataset(source: str, what: str) -> Dataset[Any]:
    """Import a dataset, or a callable that returns one. Raises `DataError`."""
    target = import_object(source, DataError, what)
    try:
        dataset = target if isinstance(target, Dataset) else with_operators(target)
    except (Exception, SystemExit) as error:
        raise DataError(f"{what}: {source} failed ({one_line(error)}); fix that callable") from error
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"{what}: {source} returned a {type(dataset).__name__}; return a torch.utils.data.Dataset"
        )
    return dataset
