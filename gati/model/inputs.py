"""Inputs other than images: one or several numeric arrays per input.

The rest of Gati sees one tensor per input. Several arrays, such as token ids and a mask, are packed: stacked
[N, arrays, ...] if they have one shape, else flattened and concatenated [N, values]. `gati.model.packed`
unpacks them inside the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.errors import DataError
from gati.model.arrays import apart, one_of, shape_of_one

ALONE = "inputs"  # the array of a network that takes only one, whatever its code calls it
_TYPES = {"b": "bool", "i": "int64", "u": "int64", "f": "float32"}  # dtypes by NumPy's kinds
_TORCH = {"bool": torch.bool, "int64": torch.int64, "float32": torch.float32}
_MOST_RANGES = 1024  # positions of a vector
_ROWS = 4096  # inputs that are looked at together
_LARGEST_CODE = 2**24  # larger floats are all whole


@dataclass(frozen=True)
class InputPart:
    """One array of the network's input: `shape` per input, `dtype` bool, int64 or float32.

    `low` and `high` are the smallest and largest values in the data of the exploration. `rows` is the size of
    the embedding that reads the array (ids are below it); None if there is no such embedding. `ranges` has
    the smallest and largest value at each position of a vector, or of all in other arrays, as integers where
    all values are whole; it is empty if the network takes any others.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    rows: int | None = None
    ranges: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class TensorInputs:
    """The network's input arrays, in the order in which they are packed."""

    parts: tuple[InputPart, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], what: str) -> TensorInputs:
        """Describe and check named arrays [N, ...]. `what` begins the error messages.

        **Raises:** `DataError` for arrays that are not numeric, empty, not finite or of different lengths, or
        for integers mixed with floats.
        """
        if not arrays:
            raise DataError(f"{what} has no arrays; give those that the network takes, by name")
        counts = {len(array) if array.ndim else 0 for array in arrays.values()}
        if len(counts) > 1:
            listed = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise DataError(f"{what}: arrays differ in length ({listed}); give one row of each per input")
        if counts == {0}:
            raise DataError(f"{what} is empty; give at least a few hundred inputs")
        parts = tuple(_part(name, array, what) for name, array in arrays.items())
        if len(parts) == 1 and not parts[0].shape:
            raise DataError(f"{what}: {parts[0].name} has one number per input; give [N, 1] or [N, ...]")
        if len({part.dtype == "float32" for part in parts}) > 1:
            listed = ", ".join(f"{part.name} {part.dtype}" for part in parts)
            raise DataError(
                f"{what}: integers mixed with floats ({listed}); make all of them float32, and convert those "
                "that the network needs as integers in its forward"
            )
        return cls(parts)

    def with_ranges(self, arrays: Mapping[str, NDArray[Any]]) -> TensorInputs:
        """The same, with the ranges of the values in `arrays`, which `example` then keeps to."""
        return TensorInputs(
            tuple(replace(each, ranges=_ranges(each, arrays[each.name])) for each in self.parts)
        )

    @property
    def has_codes(self) -> bool:
        """Whether there are ranges of whole numbers among floats: these may be codes, as of an embedding."""
        floats = (part for part in self.parts if part.dtype == "float32")
        return any(isinstance(low, int) for part in floats for low, _ in part.ranges)

    def without_ranges(self) -> TensorInputs:
        """The same, for a network that takes any values between the smallest and the largest."""
        return TensorInputs(tuple(replace(each, ranges=()) for each in self.parts))

    @property
    def alone(self) -> bool:
        """Whether the network takes one array."""
        return len(self.parts) == 1

    @property
    def dtype(self) -> torch.dtype:
        """Of the packed tensor: float32, or int64 for integers and masks."""
        return torch.float32 if self.parts[0].dtype == "float32" else torch.int64

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one packed input."""
        return shape_of_one(self._shapes)

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [part.shape for part in self.parts]

    def pack(self, arrays: Mapping[str, NDArray[Any]], what: str) -> NDArray[Any]:
        """Pack named arrays [N, ...] to [N, *shape], int64 or float32. Raises `DataError` as `check`."""
        given = arrays
        if self.alone and len(arrays) == 1 and ALONE in (*arrays, self.parts[0].name):
            given = {self.parts[0].name: next(iter(arrays.values()))}
        names = [part.name for part in self.parts]
        if set(given) != set(names):
            raise DataError(
                f"{what} has the arrays {', '.join(given)}; the network takes {', '.join(names)}: rename them"
            )
        found = TensorInputs.of({name: given[name] for name in names}, what)
        for part, own in zip(found.parts, self.parts, strict=True):
            if part.shape != own.shape or (part.dtype == "float32") != (own.dtype == "float32"):
                raise DataError(
                    f"{what}: {part.name} is {part.dtype} {_listed(part.shape)}, the network was explored "
                    f"with {own.dtype} {_listed(own.shape)}; pad, truncate or convert it"
                )
        self.check_rows(given, what)
        kind = np.float32 if self.dtype == torch.float32 else np.int64
        return one_of([given[name].astype(kind, copy=False) for name in names])

    def check_rows(self, arrays: Mapping[str, NDArray[Any]], what: str) -> None:
        """Check that ids are within their embedding. Raises `DataError` naming the first that is not."""
        for part in self.parts:
            if part.rows is None:
                continue
            values = arrays[part.name].reshape(len(arrays[part.name]), -1)
            if not values.size or (values.min() >= 0 and values.max() < part.rows):
                continue
            wrong = np.argwhere((values < 0) | (values >= part.rows))
            if len(wrong):
                row, place = wrong[0]
                raise DataError(
                    f"{what}: {part.name} holds {values[row, place]} (input {row}); ids run from 0 to "
                    f"{part.rows - 1}, the rows of the network's embedding: is this the network's tokenizer?"
                )

    def check(self, packed: NDArray[Any], what: str = "the input") -> None:
        """Check packed inputs [N, *shape] of a client. Raises `DataError`."""
        if packed.shape[1:] != self.shape or packed.ndim == 0:
            raise DataError(
                f"{what} has shape {list(packed.shape)}; give [batch, {', '.join(map(str, self.shape))}] "
                f"({self.described()})"
            )
        self.check_rows(self.split(packed), what)

    def split(self, packed: Any) -> dict[str, Any]:
        """Split a packed array or tensor [N, *shape] into arrays by name, keeping its dtype."""
        names = [part.name for part in self.parts]
        return dict(zip(names, apart(packed, self._shapes), strict=True))

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """Split a packed tensor [B, *shape] into the network's arguments, by name, in their own dtypes."""
        kinds = {part.name: _TORCH[part.dtype] for part in self.parts}
        return {name: tensor.to(kinds[name]) for name, tensor in self.split(packed).items()}

    def example(self, rows: int = 2, seed: int = 0, *, binary: bool = False) -> Tensor:
        """Random packed inputs [rows, *shape]: integers in the range of the exploration's, normal floats.

        Where there are `ranges`, all values are within them.

        With `binary` integers are 0 and 1, which every embedding has rows for. Masks begin with 1: attention
        to nothing is undefined.
        """
        generator = np.random.default_rng(seed)
        arrays: dict[str, NDArray[Any]] = {}
        for part in self.parts:
            shape = (rows, *part.shape)
            if part.ranges:
                arrays[part.name] = _within(part.ranges, shape, generator)
                continue
            if part.dtype == "float32":
                arrays[part.name] = generator.standard_normal(shape).astype(np.float32)
                continue
            low, high = int(part.low), int(part.high)
            if binary:
                low, high = 0, int(high > 0)
            values = generator.integers(low, high + 1, shape)
            if part.shape:
                values[..., 0] = high
            arrays[part.name] = values
        kind = np.float32 if self.dtype == torch.float32 else np.int64
        whole = {name: array.astype(kind) for name, array in arrays.items()}
        return torch.from_numpy(replace(self, parts=_unbounded(self.parts)).pack(whole, "example"))

    def described(self) -> str:
        """For messages: `input_ids int64 [128], attention_mask int64 [128]`."""
        return ", ".join(f"{part.name} {part.dtype} {_listed(part.shape)}" for part in self.parts)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain JSON values; `from_json` reads them back unchanged."""
        plain = [{**asdict(part), "shape": list(part.shape)} for part in self.parts]
        for part in plain:
            part["ranges"] = list(map(list, part["ranges"]))
            if not part["ranges"]:
                del part["ranges"]  # not in older libraries
        return plain

    @classmethod
    def from_json(cls, values: list[dict[str, Any]]) -> TensorInputs:
        """Read what `to_json` wrote."""
        return cls(tuple(map(_from_json, values)))


def _from_json(values: Mapping[str, Any]) -> InputPart:
    ranges = tuple((low, high) for low, high in values.get("ranges", ()))
    return InputPart(**{**values, "shape": tuple(values["shape"]), "ranges": ranges})


def _part(name: str, array: NDArray[Any], what: str) -> InputPart:
    kind = _TYPES.get(array.dtype.kind)
    if kind is None:
        raise DataError(f"{what}: {name} has dtype {array.dtype}; give integers, floats or booleans")
    if 0 in array.shape[1:]:
        raise DataError(
            f"{what}: {name} has shape {list(array.shape)}: no values; give at least one per input"
        )
    low, high = array.min(), array.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise DataError(f"{what}: {name} has NaN or infinite values; give finite numbers")
    if kind == "int64" and int(high) > np.iinfo(np.int64).max:
        raise DataError(f"{what}: {name} holds {high}, which exceeds int64; give smaller numbers")
    if kind == "float32" and (largest := max(high, -low)) > np.finfo(np.float32).max:
        raise DataError(f"{what}: {name} holds {largest:.3g}, which exceeds float32; give smaller numbers")
    as_number = float if kind == "float32" else int
    return InputPart(name, kind, tuple(array.shape[1:]), as_number(low), as_number(high))


def _ranges(part: InputPart, array: NDArray[Any]) -> tuple[tuple[float, float], ...]:
    if array.ndim != 2 or array.shape[1] > _MOST_RANGES:
        return ((part.low, part.high),)
    lowest, highest = array.min(0), array.max(0)
    whole = np.ones(array.shape[1], bool)
    if part.dtype == "float32":
        whole = np.maximum(-lowest.astype(float), highest.astype(float)) <= _LARGEST_CODE
        for rows in np.array_split(array, len(array) // _ROWS + 1):
            whole &= (rows == np.floor(rows)).all(0)
    ends = zip(lowest.tolist(), highest.tolist(), whole.tolist(), strict=True)
    return tuple(
        (int(low), int(high)) if is_whole else (float(low), float(high)) for low, high, is_whole in ends
    )


def _within(
    ranges: tuple[tuple[float, float], ...], shape: tuple[int, ...], generator: np.random.Generator
) -> NDArray[Any]:
    """Random values within the ranges, of which there is one for each position, or one for all."""
    size = shape if len(ranges) == 1 else shape[:1]
    drawn = [
        generator.integers(low, int(high), size, endpoint=True)
        if isinstance(low, int)
        else generator.uniform(low, high, size)
        for low, high in ranges
    ]
    return drawn[0] if len(drawn) == 1 else np.stack(drawn, axis=1)


def _unbounded(parts: tuple[InputPart, ...]) -> tuple[InputPart, ...]:
    return tuple(replace(part, rows=None) for part in parts)


def _listed(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
