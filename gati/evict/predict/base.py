"""The interface of predictors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

_Scalar = TypeVar("_Scalar", bound=np.generic)


class Predictor(Protocol):
    """Predicts the next use of each block of one cache; larger numbers mean later.

    Predictions are stored by the slots of runs in the cached tree.
    """

    def observe(self, ids: list[int], request: int, time_s: float) -> list[int]:
        """Process a request before it is served.

        Returns the ends of its sections, whose blocks share one prediction; the last is `len(ids)`.
        """

    def assign(self, slot: int, stretch: int) -> None:
        """The run in `slot` lies in section number `stretch` of the last observed request."""

    def copy(self, source: int, target: int) -> None:
        """A run was split: copy the state of slot `source` to `target`."""

    def scores(self, count: int) -> NDArray[np.float64]:
        """Predicted next uses for slots 0..count-1 as of the last observed request, [count].

        Values of slots without a run are arbitrary.
        """

    def figures(self) -> Mapping[str, Any]:
        """The predictor's counts, as JSON values."""


def grown(array: NDArray[_Scalar], rows: int) -> NDArray[_Scalar]:
    """Return `array` with at least `rows` rows; if it must grow, its length at least doubles."""
    if rows <= len(array):
        return array
    larger = np.zeros((max(rows, 2 * len(array)), *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger
