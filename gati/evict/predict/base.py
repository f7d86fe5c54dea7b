"""The interface of predictors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

_Scalar = TypeVar("_Scalar", bound=np.generic)


class Predictor(Protocol):
    """Predicts for the blocks of one cache when each is used next; larger numbers mean later.

    Predictions are kept by the slots of runs in the cached tree.
    """

    def observe(self, ids: list[int], request: int, time_s: float) -> list[int]:
        """Take in a request before it is served.

        Returns where on its path predictions change: each number is the end of a stretch of blocks that share
        one, the last is `len(ids)`.
        """

    def assign(self, slot: int, stretch: int) -> None:
        """The run in `slot` lies in this stretch of the request observed last."""

    def copy(self, source: int, target: int) -> None:
        """A run was split: what holds for slot `source` holds for `target`."""

    def scores(self, count: int) -> NDArray[np.float64]:
        """Predicted next uses for slots 0..count-1 as of the request observed last, [count].

        Of slots without a run, anything.
        """

    def figures(self) -> Mapping[str, Any]:
        """Counts of its own, as JSON values."""


def grown(array: NDArray[_Scalar], rows: int) -> NDArray[_Scalar]:
    """Return `array` with at least `rows` rows, twice as many as before where it must grow."""
    if rows <= len(array):
        return array
    larger = np.zeros((max(rows, 2 * len(array)), *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger
