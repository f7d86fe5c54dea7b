"""Several arrays of the same inputs as one, and back. Needs NumPy alone, for processes without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["apart", "one_of", "shape_of_one"]

Shapes = Sequence[tuple[int, ...]]  # of one input, of each array


def shape_of_one(shapes: Shapes) -> tuple[int, ...]:
    """The shape of one input of `one_of`: [arrays, ...] where all have one shape, else [values]."""
    if len(shapes) == 1:
        return shapes[0]
    if len(set(shapes)) == 1:
        return (len(shapes), *shapes[0])
    return (sum(map(math.prod, shapes)),)


def one_of(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Arrays [N, ...] of one dtype as one, contiguous; a single one as it is."""
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0])
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays, axis=1)
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)


def apart(whole: Any, shapes: Shapes) -> list[Any]:
    """The arrays [N, *shape] that `one_of` was given, of an array or a tensor."""
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
