"""The settings of memory, from strict to loose: what each would answer.

A setting answers inputs whose risk of a wrong answer (`gati.adaptation.risk`) is so low that, of what it
would answer, no more than a share of the tolerated disagreement is expected to be wrong. Each audit steers
that share: a loss halves it, every audit raises it a little, never above the setting's own `most`, at which
it begins; below a floor nothing is answered.

How far memory may go is decided by `gati.guard.ladder`. The proof of a setting counts the audits of what it
would have answered, and those alone, with the steering and the learning that it will serve with: what is
proven is what serves.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST", "RecallSetting"]

MOST = (0.1, 0.3, 0.6)  # what may be expected to be wrong, as a share of the tolerated
_TARGET = 0.5  # of the tolerated disagreement, that steering aims at
_RATE = 0.7  # a loss halves what may be expected
_FLOOR = 0.02  # below it nothing is answered
_LEAST = 0.01
_HIGHEST_RISK = 0.5


class RecallSetting:
    """One setting: `most` bounds what is expected to be wrong, as a share of what `agreement` tolerates."""

    def __init__(self, most: float, agreement: float) -> None:
        self._most = most
        self._tolerated = 1.0 - agreement
        self._allowed = most
        self._mean_risk: NDArray[np.float64] = np.empty(0)
        self._risks: NDArray[np.float64] = np.empty(0)
        self.threshold = 0.0  # inputs of a lower risk are answered

    @property
    def allowed(self) -> float:
        """What may be expected to be wrong now, as a share of the tolerated."""
        return self._allowed

    def steer_from(self, allowed: float) -> None:
        """Go on where steering was. Raises ValueError for what it cannot have come to."""
        if not _LEAST <= allowed <= self._most:
            raise ValueError(f"{allowed!r} is not from {_LEAST} to {self._most}")
        self._allowed = allowed
        self._place()

    def begin(self) -> None:
        """Be as loose as it may ever be; what was learned stays."""
        self._allowed = self._most
        self._place()

    def expect(self, risks: NDArray[np.float64]) -> None:
        """Take in the risks of recent inputs, rising, by which the threshold is found."""
        self._risks = risks
        self._mean_risk = np.cumsum(risks) / np.arange(1, len(risks) + 1)
        self._place()

    def audited(self, *, would_answer: bool, wrong: bool) -> None:
        """Take in an audit; `would_answer` was decided when the input was looked at."""
        lost = would_answer and wrong
        step = _TARGET * self._tolerated - (1.0 if lost else 0.0)
        self._allowed = min(max(self._allowed * math.exp(_RATE * step), _LEAST), self._most)
        self._place()

    def _place(self) -> None:
        answered = 0
        if self._allowed >= _FLOOR:
            answered = int(np.searchsorted(self._mean_risk, self._allowed * self._tolerated))
        self.threshold = min(float(self._risks[answered - 1]), _HIGHEST_RISK) if answered else 0.0
