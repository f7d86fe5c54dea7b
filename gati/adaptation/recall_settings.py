"""The settings of a memory, from strict to loose: each decides which inputs to answer.

A setting answers inputs with a risk of a wrong answer (`Risk`) below a threshold. The threshold is chosen so
that the expected share of wrong answers (or of wrong requests, if memory answers alone) is at most a share of
the tolerated disagreement. Audits steer that share: a loss halves it, every audit raises it slightly, up to
the setting's own `most`, where it begins; below a floor nothing is answered.

`gati.guard.ladder` decides which settings may answer. The proof of a setting counts only audits of inputs
that it would have answered, with the same steering and learning as when it serves.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

MOST = (0.05, 0.15, 0.4)  # expected wrong answers, as a share of the tolerated ones
_TARGET = 0.5  # share of the tolerated disagreement that steering aims at
_RATE = 0.7  # step of steering: a loss halves the allowed share
_FLOOR = 0.02  # below it nothing is answered
_LEAST = 0.01
_HIGHEST_RISK = 0.5

_STEPS = 25
_CLOSE = 1e-3
_PRESUMED = 2  # assumed wrong examples, further away than any seen so far
_FURTHER = float(np.log(2.0))


class Risk:
    """The probability that a remembered answer is wrong, by logistic regression.

    Fitted by Newton's method to features [n, d] and labels [n], with L2 regularisation. The first `further`
    features grow with the distance to remembered inputs, the others fall. Inputs twice as far away as any
    seen are assumed wrong, so that a scene that has never changed does not teach that nothing can change.
    """

    def __init__(self, features: NDArray[np.float64], wrong: NDArray[np.bool_], further: int) -> None:
        far = features.max(axis=0)
        far[further:] = features[:, further:].min(axis=0)
        far[:further] += _FURTHER
        rows = np.vstack((features, np.tile(far, (_PRESUMED, 1))))
        labels = np.concatenate((wrong, np.ones(_PRESUMED))).astype(np.float64)
        mean, spread = rows.mean(axis=0), rows.std(axis=0) + 1e-6
        design = np.column_stack(((rows - mean) / spread, np.ones(len(rows))))
        penalty = np.ones(design.shape[1])
        penalty[-1] = 1e-3  # the intercept is hardly regularised
        weights = np.zeros(design.shape[1])
        for _ in range(_STEPS):
            expected = _logistic(design @ weights)
            gradient = design.T @ (expected - labels) + penalty * weights
            curvature = (design * (expected * (1.0 - expected))[:, None]).T @ design + np.diag(penalty)
            step = np.linalg.solve(curvature, gradient)
            weights -= step
            if np.abs(step).max() < _CLOSE:
                break
        self._weights = weights[:-1] / spread
        self._intercept = float(weights[-1] - mean @ self._weights)

    def __call__(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """The probability of a wrong answer for each row of features [..., d]."""
        return _logistic(features @ self._weights + self._intercept)


def _logistic(logit: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * (1.0 + np.tanh(0.5 * logit))


class RecallSetting:
    """One setting: `most` bounds the expected share of wrong answers, relative to what `agreement` tolerates.

    It is a share of the answers, or of all requests if `of_all`.
    """

    def __init__(self, most: float, agreement: float, *, of_all: bool = False) -> None:
        self._most = most
        self._of_all = of_all
        self._tolerated = 1.0 - agreement
        self._allowed = most
        self._mean_risk: NDArray[np.float64] = np.empty(0)
        self._risks: NDArray[np.float64] = np.empty(0)
        self.threshold = 0.0  # inputs of a lower risk are answered

    @property
    def allowed(self) -> float:
        """The expected share of wrong answers allowed now, relative to the tolerated one."""
        return self._allowed

    def steer_from(self, allowed: float) -> None:
        """Restore the steered share. Raises ValueError if it is out of range."""
        if not _LEAST <= allowed <= self._most:
            raise ValueError(f"{allowed!r} is not from {_LEAST} to {self._most}")
        self._allowed = allowed
        self._place()

    def begin(self) -> None:
        """Reset steering to its loosest value, `most`; the threshold's data is kept."""
        self._allowed = self._most
        self._place()

    def expect(self, risks: NDArray[np.float64]) -> None:
        """Update the threshold from the risks of recent inputs, in ascending order."""
        self._risks = risks
        of = len(risks) if self._of_all else np.arange(1, len(risks) + 1)
        self._mean_risk = np.cumsum(risks) / of
        self._place()

    def audited(self, *, would_answer: bool, wrong: bool) -> None:
        """Record an audit; `would_answer` was decided when the input was looked up."""
        lost = would_answer and wrong
        step = _TARGET * self._tolerated - (1.0 if lost else 0.0)
        self._allowed = min(max(self._allowed * math.exp(_RATE * step), _LEAST), self._most)
        self._place()

    def _place(self) -> None:
        answered = 0
        if self._allowed >= _FLOOR:
            answered = int(np.searchsorted(self._mean_risk, self._allowed * self._tolerated))
        self.threshold = min(float(self._risks[answered - 1]), _HIGHEST_RISK) if answered else 0.0
