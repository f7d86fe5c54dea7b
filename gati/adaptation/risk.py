"""How probable it is that a remembered answer is wrong: a logistic regression, fitted anew as labels come."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Risk"]

_STEPS = 25
_CLOSE = 1e-3
_PRESUMED = 2  # inputs that differ, further away than any seen so far
_FURTHER = float(np.log(2.0))


class Risk:
    """P(wrong | features), fitted by Newton's method to features [n, d] and labels [n], L2-regularised.

    The first `further` features grow with the distance to what is known, the others fall. What is twice as
    far away as anything seen is presumed to be wrong, so that a scene in which nothing ever changed does not
    teach that nothing can.
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
        penalty[-1] = 1e-3  # the intercept is free
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
        """The probability that each of features [..., d] goes with a wrong answer."""
        return _logistic(features @ self._weights + self._intercept)


def _logistic(logit: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * (1.0 + np.tanh(0.5 * logit))
