"""Exact binomial tests and confidence limits for the rate of losses.

SciPy is imported on first use: the import takes a fifth of a second, and serving rarely needs it. Importing
`scipy.stats` would take a whole second.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from gati.errors import CompositionError


def p_value(losses: int, inputs: int, accuracy: float) -> float:
    """Return P(Bin(inputs, 1 - accuracy) <= losses): the probability of so few losses at the target."""
    from scipy.special import betainc

    return 1.0 if losses >= inputs else float(betainc(inputs - losses, losses + 1, accuracy))


def required_inputs(accuracy: float, delta: float, losses: int = 0) -> int:
    """Return the fewest inputs with which `losses` disagreements certify `accuracy`; 299 for 0.99 and 0.05.

    Raises CompositionError for a target or delta outside (0, 1).
    """
    check_levels(accuracy, delta)
    low, high = losses, max(losses + 1, math.ceil(math.log(delta) / math.log(accuracy)))
    while p_value(losses, high, accuracy) > delta:
        low, high = high, 2 * high
    return bisect_left(
        range(high), True, lo=low + 1, key=lambda inputs: p_value(losses, inputs, accuracy) <= delta
    )


def agreement_lower_bound(losses: int, inputs: int, delta: float) -> float:
    """Return the exact one-sided lower confidence limit (Clopper, Pearson) of agreement; 0 without inputs."""
    if losses >= inputs:
        return 0.0
    from scipy.special import betaincinv

    return float(betaincinv(inputs - losses, losses + 1, delta))


def rate_upper_bound(losses: int, inputs: int, delta: float) -> float:
    """Return the exact one-sided upper confidence limit (Clopper, Pearson) of a rate; 1 without inputs."""
    return 1.0 - agreement_lower_bound(losses, inputs, delta)


def check_confidence(confidence: float) -> None:
    """Raise CompositionError for a confidence outside (0, 1)."""
    if not 0.0 < confidence < 1.0:
        raise CompositionError(
            f"confidence is {confidence!r}, but must lie strictly between 0 and 1, such as 0.95"
        )


def check_levels(accuracy: float, delta: float) -> None:
    """Raise CompositionError for a target or delta outside (0, 1)."""
    for name, value in (("accuracy target", accuracy), ("delta", delta)):
        if not 0.0 < value < 1.0:
            raise CompositionError(f"{name} is {value!r}, but must lie strictly between 0 and 1")
