"""How far from remembered inputs an answer of memory has been checked.

The regression of `gati.adaptation.recall_settings` extrapolates: where all inputs of a scene have one class,
it learns that distance does not matter. When the camera turns, all inputs are far away, and such answers are
wrong. So memory does not answer an input unless checked inputs at least as far away, which the regression
would have answered, too, were right.

A jump, an input far beyond all that was checked, begins another *scene*: what looks most like it needs
evidence of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

_COMPARED = 20  # checked inputs that are just further away
_MOST_WRONG = 0.25  # of these; with one assumed right and one wrong, two right ones are enough
_FEWEST = 20  # checked inputs from which the usual distance is known
_USUAL = 0.99  # share of inputs within it
_JUMP = math.log(1.5)  # of a distance beyond the usual one


class CheckedDistances:
    """The log `distances` [n] of checked inputs of a scene, and whether remembered answers were `wrong` [n].

    Not thread-safe.
    """

    def __init__(self, distances: Sequence[float] = (), wrong: Sequence[bool] = ()) -> None:
        rows = sorted(zip(distances, wrong, strict=True))
        self._distances = [distance for distance, _ in rows]
        self._wrong = [lost for _, lost in rows]

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

    def is_jump(self, distance: float) -> bool:
        """Whether an input so far away begins another scene."""
        count = len(self._distances)
        return count >= _FEWEST and distance > self._distances[int(_USUAL * (count - 1))] + _JUMP
