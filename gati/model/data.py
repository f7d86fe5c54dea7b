"""Loading inputs, with or without labels, from all supported sources; batches are read by index.

An `.npz` is held in memory, images as uint8 that are converted per batch; folders and datasets are read on
demand. Images are preprocessed. Other arrays are passed to the network as they are, packed if several.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from gati.errors import DataError
from gati.files import mode_of
from gati.model.archives import read_npz
from gati.model.datasets import DatasetData, call_dataset, from_dataset
from gati.model.folders import is_folder, list_files
from gati.model.identity import Identities
from gati.model.kept import KeptInputs
from gati.model.pictures import IMAGE_SUFFIXES, OTHER_IMAGE_SUFFIXES, file_identities, open_image
from gati.model.preprocess import Preprocessing, check_image_array, join
from gati.model.recordings import RecordingFolder, refuse_recordings
from gati.model.sequence import Data, HeldData, listed
from gati.model.tables import check_table, is_table, read_texts
from gati.model.tensors import TensorData

_FORMS = (
    "an .npz file, a CSV or Parquet file of texts, a folder of images (in class folders or not) or of "
    "recordings, package.module:callable or file.py:callable"
)


def load_data(
    source: str | Path | Dataset[Any] | Data,
    preprocessing: Preprocessing,
    *,
    what: str = "data",
    explored: bool = False,
) -> Data:
    """Load data from any supported source.

    An `.npz` holds `images` uint8 [N, H, W, C] or [N, H, W] and optionally `labels` [N] and `class_names`.
    Without `images`, its other arrays are the inputs: a numeric array `inputs` [N, ...] for networks that
    take one, or arrays named as the network's arguments, such as `input_ids` and `attention_mask`. A folder
    holds one folder per class (names sorted), or unlabelled images; or recordings, if the network takes sound
    (see `RecordingFolder`). A callable returns a `torch.utils.data.Dataset` of images or (image, label);
    float tensors must be preprocessed, uint8 [H, W, C] arrays and Pillow images will be. Other integers, and
    dicts of arrays, are inputs as in an `.npz`; `labels` or `label` in a dict is its label. A CSV or Parquet
    file holds texts, if the network has a tokenizer (see `gati.model.tables`). `what` begins the error
    messages; `explored` says that the preprocessing is that of a cache library, which no option changes.

    **Raises:** `DataError`.
    """
    if isinstance(source, Data):
        return source
    if isinstance(source, Dataset):
        return from_dataset(source, type(source).__name__, preprocessing, what)
    if not isinstance(source, str | os.PathLike):
        raise DataError(
            f"{what}: cannot read a {type(source).__name__}; give a torch.utils.data.Dataset, or {_FORMS}"
        )
    text, path = str(source), Path(source)
    in_folder = is_folder(path, what)
    if in_folder and preprocessing.sound is not None:
        recordings = RecordingFolder(path, preprocessing, what)
        found = DatasetData(recordings, path.name, preprocessing, what)
        found.note = recordings.note
        return found
    if in_folder:
        return _FolderData(path, preprocessing, what)
    if path.suffix == ".npz":
        return _from_npz(path, preprocessing, what)
    if is_table(path):
        return _from_table(path, preprocessing, what, explored)
    if ":" in text:
        return from_dataset(call_dataset(text, what), text, preprocessing, what)
    if not mode_of(path):
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
    found.class_names = None if names is None else _class_names(names, f"{what}: {path}")
    return found


def _class_names(names: NDArray[Any], where: str) -> tuple[str, ...]:
    """The `class_names` of an `.npz`. Raises `DataError` unless it is a list of names."""
    if names.ndim != 1:
        raise DataError(f"{where} has class_names of shape {list(names.shape)}; give one name per class")
    if names.dtype.kind == "S":
        names = np.char.decode(names, "utf-8", "replace")
    return tuple(str(name) for name in names)


def _from_table(path: Path, preprocessing: Preprocessing, what: str, explored: bool) -> Data:
    text, taken = preprocessing.text, preprocessing.tensors
    if text is None:
        check_table(path, what)
        if explored:
            others = "images" if preprocessing.sound is None else "recordings"
            raise DataError(
                f"{what}: {path} holds texts, and the network takes "
                f"{others if taken is None else taken.described()}; give inputs like those of gati explore"
            )
        raise DataError(f"{what}: {path} holds texts; give the network's tokenizer: --tokenizer FILE")
    table = read_texts(path, text.text_column, text.label_column, what)
    arrays = text.encode(table.texts, f"{what}: {path}", None if taken is None else text.length)
    found = TensorData(path.name, arrays, table.labels, taken, f"{what}: {path}")
    found.class_names = table.class_names
    return found


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
        if images.dtype.kind == "f":
            raise DataError(
                f"{what}: images of {path} have dtype {images.dtype}; give uint8 values 0-255 in the shape "
                "[N, H, W, C], or call the array `inputs` if it is what the network takes, float [N, C, H, W]"
            )
        images = images[..., None] if images.ndim == 3 else images
        check_image_array(images, preprocessing.channels, f"{what}: images of {path}")
        if len(images) == 0:
            raise DataError(
                f"{where} is empty (images {list(images.shape)}); give at least a few hundred images"
            )
        super().__init__(path.name, images, arrays.get("labels"), where)
        self._preprocessing = preprocessing
        if "class_names" in arrays:
            self.class_names = _class_names(arrays["class_names"], where)

    def _prepared(self, values: NDArray[Any]) -> Tensor:
        return self._preprocessing(values)


class _FolderData(Data):
    def __init__(self, folder: Path, preprocessing: Preprocessing, what: str) -> None:
        self._preprocessing = preprocessing
        self._folder = folder
        listing = list_files(folder, IMAGE_SUFFIXES, OTHER_IMAGE_SUFFIXES, what)
        if not listing.files:
            refuse_recordings(folder, what)
            raise DataError(
                f"{what}: no images ({', '.join(sorted(IMAGE_SUFFIXES))}) in {folder}; "
                "give a folder of one folder per class"
            )
        self._paths = listing.files
        self.class_names = tuple(listing.classes) or None
        self._labels = np.array(listing.numbers, dtype=np.int64) if listing.classes else None
        self.name, self.note = folder.name, listing.note
        self._kept = KeptInputs()  # uint8 [1, C, h, w]

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
        rows = listed(indices, len(self))
        return self._preprocessing.scaled(join([self._kept.get(index, self._pixels) for index in rows]))

    def keep(self, limit_bytes: int) -> None:
        self._kept.allow(limit_bytes)

    def _pixels(self, index: int) -> Tensor:
        decoded = self._preprocessing.pixels(open_image(self._paths[index]))[None]
        return self._preprocessing.fitted(decoded).contiguous()
