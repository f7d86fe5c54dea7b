"""Packing several arrays of the same inputs into one, and back. Needs only NumPy, not torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shapes = Sequence[tuple[int, ...]]  # of each array, without the batch dimension


def shape_of_one(shapes: Shapes) -> tuple[int, ...]:
    """The shape of a packed input: [arrays, ...] if all have one shape, else [values]."""
    if len(shapes) == 1:
        return shapes[0]
    if len(set(shapes)) == 1:
        return (len(shapes), *shapes[0])
    return (sum(map(math.prod, shapes)),)


def one_of(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Pack arrays [N, ...] of one dtype; a single one is only made contiguous."""
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0])
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays, axis=1)
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)


def apart(whole: Any, shapes: Shapes) -> list[Any]:
    """Unpack what `one_of` returned, an array or a tensor, into [N, *shape] each."""
    if len(shapes) == 1:
        return [whole]
    if len(set(shapes)) == 1:
        return [whole[:, index] for index in range(len(shapes))]
    found, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        found.append(whole[:, start:end].reshape(whole.shape[0], *shape))
        start = end
    return found
