"""How far from remembered inputs an answer of memory has been checked.

The regression of `gati.adaptation.recall_settings` extrapolates: where all inputs of a scene have one class,
it learns that distance does not matter. When the camera turns, all inputs are far away, and such answers are
wrong. So memory does not answer an input unless checked inputs at least as far away, which the regression
would have answered, too, were right.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

_COMPARED = 20  # checked inputs that are just further away
_MOST_WRONG = 0.25  # of these; with one assumed right and one wrong, two right ones are enough


class Reach:
    """The `distances` [n] of checked inputs, and whether remembered answers were `wrong` [n].

    Not thread-safe.
    """

    def __init__(self, distances: NDArray[np.float64], wrong: NDArray[np.bool_]) -> None:
        order = np.argsort(distances)
        self._distances: list[float] = distances[order].tolist()
        self._wrong: list[bool] = wrong[order].tolist()

    def add(self, distance: float, *, wrong: bool) -> None:
        """Record another checked input."""
        at = bisect_left(self._distances, distance)
        self._distances.insert(at, distance)
        self._wrong.insert(at, wrong)

    def covers(self, distance: float) -> bool:
        """Whether the next checked inputs at least as far away were right, except for a few."""
        at = bisect_left(self._distances, distance)
        further = self._wrong[at : at + _COMPARED]
        return sum(further) + 1 <= _MOST_WRONG * (len(further) + 2)
