"""How far from remembered inputs an answer of memory has been checked.

The regression of `gati.adaptation.recall_settings` extrapolates: where all inputs of a scene have one class,
it learns that distance does not matter. When the camera turns, all inputs are far away, and such answers are
wrong. So memory does not answer an input unless checked inputs at least as far away, which the regression
would have answered, too, were right.

A jump, an input far beyond all that was checked, begins another *scene*: what looks most like it needs
evidence of its own. Where memory would answer next to nothing, as similar inputs have different answers, all
inputs whose base answer is known tell what is usual.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

_COMPARED = 20  # checked inputs that are just further away
_MOST_WRONG = 0.25  # of these; with one assumed right and one wrong, two right ones are enough
_FEWEST = 20  # inputs from which the usual distance is known
_USUAL = 0.99  # share of inputs within it
_JUMP = math.log(1.5)  # of a distance beyond the usual one


class CheckedDistances:
    """The log `distances` [n] of inputs of a scene whose base answer is known.

    Those that memory `meant` [n] to answer are checked: remembered answers were right or `wrong` [n]. By
    default, all are. Not thread-safe.
    """

    def __init__(
        self,
        distances: Sequence[float] = (),
        wrong: Sequence[bool] = (),
        meant: Sequence[bool] | None = None,
    ) -> None:
        self._known = sorted(distances)
        chosen = [True] * len(distances) if meant is None else meant
        rows = sorted(
            (distance, lost)
            for distance, lost, checked in zip(distances, wrong, chosen, strict=True)
            if checked
        )
        self._checked = [distance for distance, _ in rows]
        self._wrong = [lost for _, lost in rows]

    def add(self, distance: float, *, wrong: bool, meant: bool = True) -> None:
        """Record another input."""
        insort(self._known, distance)
        if meant:
            at = bisect_left(self._checked, distance)
            self._checked.insert(at, distance)
            self._wrong.insert(at, wrong)

    def covers(self, distance: float) -> bool:
        """Whether the next checked inputs at least as far away were right, except for a few."""
        at = bisect_left(self._checked, distance)
        further = self._wrong[at : at + _COMPARED]
        return sum(further) + 1 <= _MOST_WRONG * (len(further) + 2)

    def is_jump(self, distance: float) -> bool:
        """Whether an input so far away begins another scene."""
        seen = self._checked if len(self._checked) >= _FEWEST else self._known
        return len(seen) >= _FEWEST and distance > seen[int(_USUAL * (len(seen) - 1))] + _JUMP
