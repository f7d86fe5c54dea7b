"""Class names and labels in the order of the network's outputs.

The folders of a data set are numbered in sorted order, from 0. That is the network's numbering only if both
have the same classes; ten folders of images do not name a thousand outputs. So names and labels are used
only if they match the network's classes. Agreement needs neither.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gati.errors import DataError
from gati.model.identity import Identities
from gati.model.sequence import Data

ClassNames = str | Path | Sequence[str]
LabelMap = str | Path | Mapping[str, int]


@dataclass(frozen=True)
class LabelledData:
    """Data whose labels, if any, are the network's classes; `note` says what was left out, and why."""

    data: Data
    note: str = ""


def read_class_names(source: ClassNames, classes: int | None = None) -> tuple[str, ...]:
    """Read the network's class names in the order of its outputs: one per line, or a JSON list.

    **Raises:** `DataError` for an unreadable file, or a number of names other than the number of classes.
    """
    if isinstance(source, (str, Path)):
        where, text = f"--class-names {source}", _text(source, "--class-names")
        names: Any = _json(text, where) if text.lstrip().startswith("[") else text.rstrip().splitlines()
    else:
        where, names = "class_names", list(source)
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise DataError(
            f"{where} has an entry that is not a name; give one name per class, or a JSON list of them"
        )
    if classes is not None and len(names) != classes:
        raise DataError(
            f"{where} has {len(names)} names and the network {classes} classes; give one name per class, in "
            "the order of its outputs"
        )
    return tuple(name.strip() for name in names)


def read_label_map(source: LabelMap, classes: int | None = None) -> dict[str, int]:
    """Read a map of labels to the network's classes: a JSON object, folder name or label number to class.

    **Raises:** `DataError` for an unreadable file, or a class that the network does not have.
    """
    if isinstance(source, (str, Path)):
        where = f"--label-map {source}"
        found: Any = _json(_text(source, "--label-map"), where)
    else:
        where, found = "label_map", dict(source)
    if not isinstance(found, dict) or not found:
        raise DataError(f'{where} is not a map; write a JSON object such as {{"cats": 281, "dogs": 207}}')
    for label, index in found.items():
        number = isinstance(index, int) and not isinstance(index, bool)
        if not number or index < 0 or (classes is not None and index >= classes):
            last = "" if classes is None else f" to {classes - 1}"
            raise DataError(
                f"{where} maps {label!r} to {index!r}; give a class of the network, an integer from 0{last}"
            )
    return {str(label): index for label, index in found.items()}


def names_in_config(config: Any) -> tuple[str, ...] | None:
    """Return the class names in the `id2label` of a Hugging Face config, a mapping or an object; or None."""
    found = config.get("id2label") if isinstance(config, Mapping) else getattr(config, "id2label", None)
    if not isinstance(found, Mapping):
        return None
    by_number = {str(number): str(name) for number, name in found.items()}
    names = tuple(by_number.get(str(number), "") for number in range(len(by_number)))
    return if_named(names)


def if_named(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return class names; None if one is empty, or they are `LABEL_0`, `LABEL_1` and so on: not named."""
    return None if "" in names or names == _unnamed(len(names)) else names


def _unnamed(classes: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{number}" for number in range(classes))


def names_of_classes(
    classes: int, known: Sequence[str] | None, data: Data, label_map: Mapping[str, int] | None = None
) -> tuple[str, ...] | None:
    """Return the network's class names, else those of the data if they match, else None.

    The folders of classes without names are sorted as text, `LABEL_10` before `LABEL_2`: the number counts.
    """
    if known is not None and len(known) == classes:
        return tuple(known)
    if data.class_names is None or len(data.class_names) != classes:
        return None
    if label_map is None:
        unnamed = _unnamed(classes)
        return unnamed if set(data.class_names) == set(unnamed) else data.class_names
    named = {label_map.get(name): name for name in data.class_names}
    return tuple(named[index] for index in range(classes)) if set(named) == set(range(classes)) else None


def fit_labels(
    data: Data,
    classes: int,
    names: Sequence[str] | None = None,
    label_map: Mapping[str, int] | None = None,
) -> LabelledData:
    """Map the labels of data to the network's classes, or drop them.

    Without `label_map`, named classes (folders) match if the network has classes of all their names, or as
    many classes in the same order; a class without a name is `LABEL_` and its number. Labels without names
    match if all are below `classes`.

    **Raises:** `DataError` for a label that is not in `label_map`.
    """
    fitted = _fitted(data, classes, names, label_map)
    return LabelledData(fitted.data, "; ".join(filter(None, (data.note, fitted.note))))


def _fitted(
    data: Data, classes: int, names: Sequence[str] | None, label_map: Mapping[str, int] | None
) -> LabelledData:
    labels = data.labels
    if labels is None:
        return LabelledData(data)
    present = np.unique(labels)
    if label_map is not None:
        if missing := unmapped(data, label_map):
            raise DataError(f"the label map has no entry for {missing[0]!r} of {data.name}; give it one")
        new = {int(label): _looked_up(data, int(label), label_map) for label in present}
        return LabelledData(
            _Relabelled(data, np.array([new[label] for label in labels.tolist()], dtype=np.int64))
        )
    if data.class_names is None:
        if int(present[-1]) < classes:
            return LabelledData(data)
        return _unlabelled(data, f"has labels up to {present[-1]} and the network {classes} classes")
    index = _index_by_name(_unnamed(classes) if names is None else names)
    found = [index.get(name) for name in data.class_names]
    if int(present[-1]) >= len(found):
        return _unlabelled(data, f"has labels up to {present[-1]} and {len(found)} class names")
    if None not in found:
        return LabelledData(_Relabelled(data, np.array(found, dtype=np.int64)[labels]))
    alike = all(where in (None, position) for position, where in enumerate(found))
    if len(found) == classes and alike:
        return LabelledData(data)
    what = f"has {len(found)} classes and the network {classes}"
    return _unlabelled(data, what if alike else f"{what}, in another order")


def unmapped(data: Data, label_map: Mapping[str, int]) -> list[str]:
    """Return the labels of data (names, if they have any) that are not in the map."""
    present = () if data.labels is None else np.unique(data.labels).tolist()
    return [_name(data, label) for label in present if _looked_up(data, label, label_map) is None]


def _name(data: Data, label: int) -> str:
    names = data.class_names or ()
    return names[label] if label < len(names) else str(label)


def _looked_up(data: Data, label: int, label_map: Mapping[str, int]) -> int | None:
    return label_map.get(_name(data, label), label_map.get(str(label)))


def _unlabelled(data: Data, why: str) -> LabelledData:
    note = (
        f"{data.name} {why}: labels and names are not the network's, so accuracy is left out "
        "(map them with --label-map FILE)"
    )
    return LabelledData(_Relabelled(data, None), note)


def _index_by_name(names: Sequence[str]) -> dict[str, int]:
    """The class of each name, except for names of several classes ("crane" in ImageNet)."""
    often = Counter(names)
    return {name: index for index, name in enumerate(names) if often[name] == 1}


def _text(path: str | Path, option: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise DataError(f"cannot read {option} {path}: {reason}; check the path") from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}); correct it") from error


class _Relabelled(Data):
    """The same inputs with other labels [N], or without."""

    def __init__(self, parent: Data, labels: NDArray[np.int64] | None) -> None:
        self._parent, self._labels = parent, labels
        self.name, self.is_images, self.tensors = parent.name, parent.is_images, parent.tensors

    def __len__(self) -> int:
        return len(self._parent)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        return self._labels

    @property
    def fingerprint(self) -> str:
        return self._parent.fingerprint

    def identify(self, indices: NDArray[np.int64]) -> Identities:
        return self._parent.subset(indices).identities

    def images(self, indices: Sequence[int] | NDArray[np.integer[Any]] | slice) -> Tensor:
        return self._parent.images(indices)
