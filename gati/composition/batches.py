"""Running a network on many inputs, as many at a time as memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gati.exploration.memory import fitting_by, in_batches

_MOST = 64

T = TypeVar("T")


def in_fitting_batches(
    count: int, images: Callable[[NDArray[np.int64]], Tensor], run: Callable[[Tensor], T], most: int = _MOST
) -> Iterator[T]:
    """Yield `run(images(indices))` for all `count` indices in their order, at most `most` at a time.

    `images` returns inputs [b, ...] on the device where `run` computes. Where memory may be short, a few of
    them show how many fit. Raises ModelError if one input does not fit.
    """

    def answer(indices: NDArray[np.int64]) -> T:
        return run(images(indices))

    if count > 1:
        most = fitting_by(answer, images(np.arange(1)), most)
    return in_batches(count, most, answer)
