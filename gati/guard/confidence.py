"""A confidence sequence for the agreement: an interval that stays valid when it is checked after every audit.

An interval for a fixed number of audits is eventually wrong if checked all the time. A confidence sequence
holds at all times simultaneously, with the stated confidence. For each share m of losses and each bet q < m
the product of the likelihood ratios

    L(q) = (q / m)^losses * ((1 - q) / (1 - m))^agreed

is a test martingale if audits are losses with probability m, and below one if they are with a probability
that is m or more on average so far, whatever the order (1 + x <= exp(x)). The mean over fixed bets is one,
too, so by Ville's inequality it ever reaches 2/delta with probability at most delta/2; so is that over
q > m. The shares m that are not rejected form the interval for the mean loss probability so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_BETS: NDArray[np.float64] = np.concatenate(
    (np.geomspace(1e-4, 0.5, 60), 1.0 - np.geomspace(0.5, 1e-4, 60)[1:])
)
_STEPS = 30


def watched_agreement(losses: int, audits: int, confidence: float = 0.95) -> tuple[float, float]:
    """Lower and upper limit of the agreement after `losses` among `audits`; (0, 1) before the first.

    With the stated confidence, the agreement lies within the limits after every number of audits.
    """
    if audits == 0:
        return 0.0, 1.0
    share, wanted = losses / audits, math.log(2.0 / (1.0 - confidence))

    def rejected(m: float) -> bool:
        return _log_evidence(m, losses, audits, below=m > share) >= wanted

    most = 1.0 if not rejected(1.0 - 1e-9) else _edge(share, 1.0 - 1e-9, rejected)
    least = 0.0 if not rejected(1e-9) else _edge(share, 1e-9, rejected)
    return 1.0 - most, 1.0 - least


def _edge(kept: float, gone: float, rejected: Callable[[float], bool]) -> float:
    for _ in range(_STEPS):
        middle = 0.5 * (kept + gone)
        if rejected(middle):
            gone = middle
        else:
            kept = middle
    return gone


def _log_evidence(m: float, losses: int, audits: int, *, below: bool) -> float:
    """log of the mean of L(q) over the bets on one side of m; no evidence if there is none."""
    bets = _BETS[m > _BETS] if below else _BETS[m < _BETS]
    if len(bets) == 0:
        return 0.0
    agreed = audits - losses
    logs = losses * np.log(bets / m) + agreed * np.log((1.0 - bets) / (1.0 - m))
    return float(np.logaddexp.reduce(logs) - math.log(len(bets)))
