"""The risk of letting an input leave, which is charged against the budget while a path is built."""

from __future__ import annotations

import numpy as np

from gati.composition.instance import Floats, Instance

PRIOR = 0.05  # on the logistic regression's coefficients
NEWTON_STEPS = 30


def smoothed_loss(instance: Instance) -> Floats:
    """Return [m, n] the mean of whether an answer is wrong and of the rate of wrong answers at its rank.

    The rank is by score; the rate is a logistic regression of each trial's wrong answers on its logit.
    """
    wrong = np.take_along_axis(instance.wrong, instance.order, axis=1).astype(np.float64)
    rank = (np.arange(instance.inputs) + 0.5) / instance.inputs
    logit = np.log(rank / (1.0 - rank))
    mean = (wrong.sum(axis=1) + 0.5) / (instance.inputs + 1.0)
    offset, slope = np.log(mean / (1.0 - mean)), np.ones(instance.trials)
    for _ in range(NEWTON_STEPS):
        rate = 1.0 / (1.0 + np.exp(-(offset[:, None] + slope[:, None] * logit)))
        weight = rate * (1.0 - rate)
        residual = wrong - rate
        # with a weak prior on both, so that perfect separation stays finite
        gradient = residual.sum(axis=1) - PRIOR * offset, (residual * logit).sum(axis=1) - PRIOR * slope
        a, b, c = (
            weight.sum(axis=1) + PRIOR,
            (weight * logit).sum(axis=1),
            (weight * logit**2).sum(axis=1) + PRIOR,
        )
        determinant = a * c - b * b
        offset = offset + np.clip((c * gradient[0] - b * gradient[1]) / determinant, -1.0, 1.0)
        slope = slope + np.clip((a * gradient[1] - b * gradient[0]) / determinant, -1.0, 1.0)
    rate = 1.0 / (1.0 + np.exp(-(offset[:, None] + slope[:, None] * logit)))
    loss: Floats = np.empty_like(rate)
    np.put_along_axis(loss, instance.order, 0.5 * wrong + 0.5 * rate, axis=1)
    return loss
