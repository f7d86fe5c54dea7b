"""Converts nested lists of numbers from JSON to arrays, in parts.

numpy holds the GIL while it converts a list: in one part, a large request would block the event loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_PART_NUMBERS = 2**15
_MOST_NESTED = 64  # dimensions; numpy allows no more


def array_of(data: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a flat or nested list as an array.

    Raises `ValueError`, `TypeError` or `OverflowError` for lists of unequal length, values that are not
    numbers, and numbers outside the range of `dtype`, or with a fraction where `dtype` is an integer type.
    """
    return _array(data, dtype, 1)


def _array(data: list[Any], dtype: np.dtype[Any], depth: int) -> NDArray[Any]:
    in_first = _count(data[0]) if data else 1
    if in_first > _PART_NUMBERS:
        if depth > _MOST_NESTED:
            raise ValueError(f"lists nested more than {_MOST_NESTED} deep")
        if not all(isinstance(each, list) for each in data):
            raise ValueError("numbers mixed with lists")
        return np.stack([_array(each, dtype, depth + 1) for each in data])
    step = _PART_NUMBERS // in_first
    if len(data) <= step:
        return _part(data, dtype)
    return np.concatenate([_part(data[start : start + step], dtype) for start in range(0, len(data), step)])


def _count(value: Any) -> int:
    """Count the numbers in a value, at least 1, assuming that all lists are as long as the first."""
    count = 1
    while isinstance(value, list) and value:
        count *= len(value)
        value = value[0]
    return count


def _part(data: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    array = np.array(data)
    if array.dtype.kind not in "biuf" and array.size:
        raise ValueError("not numbers")
    if dtype.kind in "iu" and array.size:
        _check_whole(array, dtype)
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if dtype.kind == "f" and not np.array_equal(np.isinf(converted), np.isinf(array)):
        raise ValueError(f"numbers outside {np.finfo(dtype).min} to {np.finfo(dtype).max}")
    return converted


def _check_whole(array: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Refuse numbers that a conversion to an integer type would silently change. Raises `ValueError`."""
    bounds = np.iinfo(dtype)
    if array.dtype.kind == "f" and not np.equal(np.mod(array, 1), 0).all():
        raise ValueError("numbers with a fraction")
    if array.min() < bounds.min or array.max() > bounds.max:
        raise ValueError(f"numbers outside {bounds.min} to {bounds.max}")
