"""Loading inputs, with or without labels, from all supported sources; batches are read by index.

An `.npz` is held in memory, images as uint8 that are converted per batch; folders and datasets are read on
demand. Images are preprocessed. Other arrays are passed to the network as they are, packed if several.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from gati.errors import DataError, one_line
from gati.model.archives import read_npz
from gati.model.identity import Identities, identities_of
from gati.model.inputs import ALONE
from gati.model.pictures import IMAGE_SUFFIXES, file_identities, image_files, open_image
from gati.model.preprocess import Preprocessing, check_image_array, join
from gati.model.recordings import RecordingFolder, refuse_recordings
from gati.model.sequence import Data, HeldData, check_labels
from gati.model.source import import_object
from gati.model.tables import is_table, read_texts
from gati.model.tensors import TensorData, is_whole

__all__ = ["Data", "load_data", "load_images"]

_FORMS = (
    "an .npz file, a CSV or Parquet file of texts, a folder of one folder per class, package.module:callable "
    "or file.py:callable"
)


def load_data(
    source: str | Path | Dataset[Any] | Data, preprocessing: Preprocessing, *, what: str = "data"
) -> Data:
    """Load data from any supported source.

    An `.npz` holds `images` uint8 [N, H, W, C] or [N, H, W] and optionally `labels` [N] and `class_names`.
    Without `images`, its other arrays are the inputs: a numeric array `inputs` [N, ...] for networks that
    take one, or arrays named as the network's arguments, such as `input_ids` and `attention_mask`. A folder
    holds one folder per class (names sorted), or unlabelled images; or recordings, if the network takes sound
    (see `RecordingFolder`). A callable returns a `torch.utils.data.Dataset` of images or (image, label);
    float tensors must be preprocessed, uint8 [H, W, C] arrays and Pillow images will be. Other integers, and
    dicts of arrays, are inputs as in an `.npz`. A CSV or Parquet file holds texts, if the network has a
    tokenizer (see `gati.model.tables`). `what` begins the error messages.

    **Raises:** `DataError`.
    """
    if isinstance(source, Data):
        return source
    if isinstance(source, Dataset):
        return _from_dataset(source, type(source).__name__, preprocessing, what)
    text, path = str(source), Path(source)
    if path.is_dir() and preprocessing.sound is not None:
        return _DatasetData(RecordingFolder(path, preprocessing, what), path.name, preprocessing, what)
    if path.is_dir():
        return _FolderData(path, preprocessing, what)
    if path.suffix == ".npz":
        return _from_npz(path, preprocessing, what)
    if is_table(path):
        return _from_table(path, preprocessing, what)
    if ":" in text:
        return _from_dataset(_call_dataset(text, what), text, preprocessing, what)
    if not path.exists():
        raise DataError(f"{what}: nothing at {text}; give {_FORMS}")
    raise DataError(f"{what}: cannot read {text} as data; give {_FORMS}")


def load_images(paths: Sequence[str | Path], preprocessing: Preprocessing) -> Tensor:
    """Read image files as one batch of the network's inputs, float32 [n, C, H, W].

    **Raises:** `DataError` for no files, an unreadable one, or mixed sizes.
    """
    if not paths:
        raise DataError("no images given; name at least one image file")
    return preprocessing.from_pil([open_image(Path(path)) for path in paths])


def _from_npz(path: Path, preprocessing: Preprocessing, what: str) -> Data:
    arrays = read_npz(path, what)
    if "images" in arrays:
        return _ArrayData(path, arrays, preprocessing, what)
    labels, names = arrays.pop("labels", None), arrays.pop("class_names", None)
    found = TensorData(path.name, arrays, labels, preprocessing.tensors, f"{what}: {path}")
    found.class_names = None if names is None else tuple(str(name) for name in names)
    return found


def _from_table(path: Path, preprocessing: Preprocessing, what: str) -> Data:
    text, taken = preprocessing.text, preprocessing.tensors
    if text is None:
        raise DataError(f"{what}: {path} holds texts; give the network's tokenizer: --tokenizer FILE")
    table = read_texts(path, text.text_column, text.label_column, what)
    arrays = text.encode(table.texts, f"{what}: {path}", None if taken is None else text.length)
    found = TensorData(path.name, arrays, table.labels, taken, f"{what}: {path}")
    found.class_names = table.class_names
    return found


def _from_dataset(dataset: Dataset[Any], name: str, preprocessing: Preprocessing, what: str) -> Data:
    found = _DatasetData(dataset, name, preprocessing, what)
    arrays = found.arrays()
    if arrays is None:
        return found
    whole = TensorData(name, arrays, found.labels, preprocessing.tensors, f"{what}: {name}")
    whole.class_names = found.class_names
    return whole


class _ArrayData(HeldData):
    def __init__(
        self, path: Path, arrays: Mapping[str, NDArray[Any]], preprocessing: Preprocessing, what: str
    ) -> None:
        if preprocessing.tensors is not None:
            raise DataError(
                f"{what}: {path} holds images and this network takes {preprocessing.tensors.described()}; "
                "give an .npz with those"
            )
        images, where = arrays["images"], f"{what}: {path}"
        images = images[..., None] if images.ndim == 3 else images
        check_image_array(images, preprocessing.channels, f"{what}: images of {path}")
        if len(images) == 0:
            raise DataError(
                f"{where} is empty (images {list(images.shape)}); give at least a few hundred images"
            )
        super().__init__(path.name, images, arrays.get("labels"), where)
        self._preprocessing = preprocessing
        if "class_names" in arrays:
            self.class_names = tuple(str(name) for name in arrays["class_names"])

    def _prepared(self, values: NDArray[Any]) -> Tensor:
        return self._preprocessing(values)


class _FolderData(Data):
    def __init__(self, folder: Path, preprocessing: Preprocessing, what: str) -> None:
        self._preprocessing = preprocessing
        self._folder = folder
        classes = sorted(
            entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
        )
        if classes:
            found = [
                (path, number)
                for number, name in enumerate(classes)
                for path in image_files(folder / name, "**/*")
            ]
        else:
            found = [(path, -1) for path in image_files(folder, "*")]
        if not found:
            refuse_recordings(folder, what)
            raise DataError(
                f"{what}: no images ({', '.join(sorted(IMAGE_SUFFIXES))}) in {folder}; "
                "give a folder of one folder per class"
            )
        self._paths = [path for path, _ in found]
        self.class_names = tuple(classes) or None
        self._labels = np.array([number for _, number in found], dtype=np.int64) if classes else None
        self.name = folder.name
        self._kept: dict[int, Tensor] = {}  # uint8 [1, C, h, w]
        self._room_bytes = 0

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        return self._labels

    @cached_property
    def fingerprint(self) -> str:
        entries = [(str(path.relative_to(self._folder)), path.stat().st_size) for path in self._paths]
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()

    def identify(self, indices: NDArray[np.int64]) -> Identities:
        return file_identities([self._paths[index] for index in indices], self._preprocessing)

    def images(self, indices: Sequence[int] | NDArray[np.integer[Any]] | slice) -> Tensor:
        return self._preprocessing.scaled(
            join([self._pixels(index) for index in _as_list(indices, len(self))])
        )

    def keep(self, limit_bytes: int) -> None:
        self._room_bytes = limit_bytes - sum(pixels.nbytes for pixels in self._kept.values())

    def _pixels(self, index: int) -> Tensor:
        if index in self._kept:
            return self._kept[index]
        pixels = self._preprocessing.fitted(self._preprocessing.pixels(open_image(self._paths[index]))[None])
        if pixels.nbytes <= self._room_bytes:
            self._kept[index] = pixels.contiguous()
            self._room_bytes -= pixels.nbytes
        return pixels


class _DatasetData(Data):
    def __init__(self, dataset: Dataset[Any], name: str, preprocessing: Preprocessing, what: str) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(f"{what}: {name} is an iterable dataset; give one with __len__ and __getitem__")
        self._dataset = dataset
        self._what = f"{what}: {name}"
        self._preprocessing = preprocessing
        self._length = len(dataset)
        if self._length == 0:
            raise DataError(f"{self._what} is empty; give at least a few hundred images")
        self.name = name
        self._as_arrays = False
        image, label = self._item(0)
        self._as_arrays = isinstance(image, Mapping) or is_whole(image)
        self._has_labels = label is not None
        names = getattr(dataset, "classes", None)  # as torchvision's datasets call them
        if isinstance(names, (list, tuple)) and names and all(isinstance(name, str) for name in names):
            self.class_names = tuple(names)
        self.is_images = not (isinstance(image, Tensor) and image.is_floating_point())

    def __len__(self) -> int:
        return self._length

    @cached_property
    def labels(self) -> NDArray[np.int64] | None:
        if not self._has_labels:
            return None
        for attribute in ("targets", "labels"):  # torchvision's datasets have them without decoding
            known = getattr(self._dataset, attribute, None)
            if known is not None and len(known) == self._length:
                return check_labels(np.asarray(known), self._length, self._what)
        try:
            numbers = [int(self._item(index)[1]) for index in range(self._length)]
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self._what} has labels that are not numbers ({one_line(error)}); "
                "give integer class numbers from 0"
            ) from error
        return check_labels(np.array(numbers), self._length, self._what)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.name}:{self._length}".encode())
        probes = np.unique(np.linspace(0, self._length - 1, 16).astype(np.int64))
        digest.update(self.images(probes).numpy().tobytes())
        return digest.hexdigest()

    def identify(self, indices: NDArray[np.int64]) -> Identities:
        return identities_of(self._content(self._item(int(index))[0]) for index in indices)

    def images(self, indices: Sequence[int] | NDArray[np.integer[Any]] | slice) -> Tensor:
        items = [self._item(index)[0] for index in _as_list(indices, len(self))]
        if not self.is_images:
            return self._stack(items)
        return join([self._preprocessing(self._content(image)[None]) for image in items])

    def arrays(self) -> dict[str, NDArray[Any]] | None:
        """All items as named arrays [N, ...] if they are dicts or integers, None for images."""
        if not self._as_arrays:
            return None
        items = [self._item(index)[0] for index in range(self._length)]
        rows = [item if isinstance(item, Mapping) else {ALONE: item} for item in items]
        try:
            return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(
                f"{self._what}: items differ ({one_line(error)}); return arrays of the same names and shapes"
            ) from error

    def _item(self, index: int) -> tuple[Any, Any]:
        try:
            item = self._dataset[index]
        except DataError as error:  # already says what to do
            raise DataError(f"{self._what.partition(':')[0]}: {error}") from error
        except Exception as error:
            raise DataError(
                f"{self._what}: reading item {index} failed ({one_line(error)}); fix that dataset"
            ) from error
        image, label = (
            (item[0], item[1]) if isinstance(item, (tuple, list)) and len(item) >= 2 else (item, None)
        )
        if not isinstance(image, (Tensor, np.ndarray, Image.Image, Mapping)):
            raise DataError(
                f"{self._what}: item {index} holds a {type(image).__name__}; return a tensor, an array, a "
                "dict of those or a Pillow image, alone or with a label"
            )
        return image, label

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

    def _stack(self, items: list[Any]) -> Tensor:
        shape = tuple(items[0].shape)
        for item in items:
            if not isinstance(item, Tensor) or tuple(item.shape) != shape or not item.is_floating_point():
                found = (
                    f"{item.dtype} {list(item.shape)}" if isinstance(item, Tensor) else type(item).__name__
                )
                raise DataError(
                    f"{self._what}: items differ (float {list(shape)} and {found}); "
                    "return tensors of one dtype and shape"
                )
        if len(shape) == 3 and shape[0] != self._preprocessing.channels:
            raise DataError(
                f"{self._what}: tensors have shape {list(shape)} and the network takes "
                f"{self._preprocessing.channels} channels; return float tensors [C, H, W]"
            )
        return torch.stack(items).to(torch.float32)


def _call_dataset(source: str, what: str) -> Dataset[Any]:
    target = import_object(source, DataError, what)
    try:
        dataset = target if isinstance(target, Dataset) else target()
    except Exception as error:
        raise DataError(f"{what}: {source} failed ({one_line(error)}); fix that callable") from error
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"{what}: {source} returned a {type(dataset).__name__}; return a torch.utils.data.Dataset"
        )
    return dataset


def _as_list(indices: Sequence[int] | NDArray[np.integer[Any]] | slice, length: int) -> list[int]:
    if isinstance(indices, slice):
        return list(range(length))[indices]
    return [int(index) for index in indices]
