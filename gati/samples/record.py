"""A sampled input with the base model's answer, and its storage format: raw bytes, dtype and shape.

Nothing is ever pickled. Inputs are arrays of booleans, integers or floats only, so that reading from a store
that others can write to yields nothing but numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import AdaptError

OVERHEAD_BYTES = 256  # counted per record for its other columns, the row and the indexes

_KINDS = ("image", "input")
_DTYPE = re.compile(r"[<>|=]?[biuf]\d{1,2}")
LONGEST_TEXT = 512
_MOST_AXES = 32


@dataclass(frozen=True, eq=False)
class Record:
    """One sampled input with the base model's answer to it.

    `kind` says what `input` is: `image` (uint8, HWC) or `input` (the preprocessed tensor, without the batch
    dimension). `time_s` is in seconds since 1970.
    `number` grows from record to record of a store and stays the same; None for a record not read from one.
    `exit` is the block at whose cache the request left, None if the base model answered; `agreed` is
    whether that early answer was the base model's, None if it was not audited.
    The array is not copied: do not modify it afterwards.

    **Raises:** `AdaptError` for values that cannot be stored.
    """

    input: NDArray[Any]
    kind: str
    base_class: int
    time_s: float
    model: str
    source: str = ""
    exit: str | None = None
    agreed: bool | None = None
    probabilities: NDArray[np.floating[Any]] | None = None  # the base model's, shape [classes]
    number: int | None = None

    def __post_init__(self) -> None:
        _check_array("input", self.input)
        if self.probabilities is not None:
            _check_array("probabilities", self.probabilities)
        if self.kind not in _KINDS:
            raise AdaptError(f"kind is {self.kind!r}, must be one of {', '.join(_KINDS)}")
        if not 0 <= self.base_class < 2**31:
            raise AdaptError(f"base_class is {self.base_class!r}, must be a class number from 0")
        if not (math.isfinite(self.time_s) and abs(self.time_s) < 1e15):
            raise AdaptError(f"time_s is {self.time_s!r}, must be seconds since 1970")
        if not self.model:
            raise AdaptError("a record needs the name of the model that answered it, got ''")
        for name in ("model", "source", "exit"):
            _check_text(name, getattr(self, name))

    @property
    def nbytes(self) -> int:
        """Size of the record for a store's limit, in bytes."""
        answers = 0 if self.probabilities is None else self.probabilities.nbytes
        texts = sum(len(text) for text in (self.model, self.source, self.kind, self.exit or ""))
        return self.input.nbytes + answers + texts + OVERHEAD_BYTES


def encode(record: Record) -> dict[str, Any]:
    """The record as columns of a table."""
    answers = record.probabilities
    return {
        "time_s": float(record.time_s),
        "model": record.model,
        "kind": record.kind,
        "source": record.source,
        "base_class": int(record.base_class),
        "left_at": record.exit,
        "agreed": None if record.agreed is None else bool(record.agreed),
        "bytes": record.nbytes,
        "dtype": record.input.dtype.str,
        "shape": json.dumps(record.input.shape),
        "probabilities_dtype": None if answers is None else answers.dtype.str,
        "probabilities": None if answers is None else answers.tobytes(),
        "input": record.input.tobytes(),
    }


def decode(row: Mapping[str, Any]) -> Record:
    """The record from the columns made by `encode`, with writable arrays.

    **Raises:** `AdaptError` if the columns are inconsistent.
    """
    answers = row["probabilities"]
    length = None if answers is None else len(answers)
    return Record(
        input=_array(row["input"], row["dtype"], row["shape"]),
        kind=row["kind"],
        base_class=row["base_class"],
        time_s=row["time_s"],
        model=row["model"],
        source=row["source"],
        exit=row["left_at"],
        agreed=row["agreed"],
        probabilities=None if length is None else _array(answers, row["probabilities_dtype"], None),
        number=row.get("id"),
    )


def _array(data: bytes, dtype: str | None, shape: str | None) -> NDArray[Any]:
    """The array in `data`; one-dimensional if `shape` is None."""
    if dtype is None or not _DTYPE.fullmatch(dtype):
        raise AdaptError(f"a record's dtype is {dtype!r}, not one of plain numbers: the store is damaged")
    try:
        flat = np.frombuffer(data, dtype=np.dtype(dtype)).copy()
        return flat if shape is None else flat.reshape([_axis(size) for size in json.loads(shape)])
    except (TypeError, ValueError) as problem:
        raise AdaptError(
            f"a record of {len(data)} bytes is not a {dtype} array of shape {shape}: the store is damaged"
        ) from problem


def _axis(size: object) -> int:
    if type(size) is not int or size < 0:
        raise ValueError(size)
    return size


def _check_array(name: str, array: object) -> None:
    if not isinstance(array, np.ndarray):
        raise AdaptError(f"{name} is a {type(array).__name__}, must be a numpy array")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise AdaptError(f"{name} has dtype {array.dtype}, must be booleans, integers or floats to 64 bits")
    if array.ndim > _MOST_AXES:
        raise AdaptError(f"{name} has {array.ndim} axes, at most {_MOST_AXES} are kept")


def _check_text(name: str, text: str | None) -> None:
    if text is None:
        return
    if len(text) > LONGEST_TEXT or "\0" in text or not _is_utf8(text):
        raise AdaptError(
            f"{name} is {text[:40]!r}, must be at most {LONGEST_TEXT} characters without NUL or surrogates"
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
