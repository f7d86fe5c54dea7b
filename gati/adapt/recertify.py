"""May caches that were stopped come back? A test that may be looked at after every audit.

The certificate of `gati compose` counts a fixed number of inputs once. Audits come one by one, and whoever
waits for the count to look right has tested many times. So the evidence is the capital of a gambler who bets
that losses are rarer than the tolerated share `alpha`:

    W_t = W_{t-1} * (1 + lambda * (alpha - loss_t)),   W_0 = 1,   lambda in [0, 1/(1 - alpha))

If losses come with probability alpha or more, whatever happened before, W is a supermartingale, and the
chance that it ever reaches 1/delta is at most delta (Ville's inequality). The stake is split over several
lambdas.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gati.errors import AdaptError

__all__ = ["Recertification"]

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)  # of the tolerated disagreement: what the true one may be


@dataclass
class Recertification:
    """Collects audits of caches that do not answer yet; `passed` once agreement is proven at `confidence`.

    Raises AdaptError for values that make no promise.
    """

    agreement: float
    confidence: float = 0.95
    audits: int = field(default=0, init=False)
    losses: int = field(default=0, init=False)
    passed: bool = field(default=False, init=False)
    _bets: NDArray[np.float64] = field(init=False, repr=False)
    _capital: NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, value in (("agreement", self.agreement), ("confidence", self.confidence)):
            if not 0.0 < value < 1.0:
                raise AdaptError(f"{name} is {value!r}, must lie strictly between 0 and 1, for example 0.95")
        alpha = 1.0 - self.agreement
        true = alpha * np.array(_SHARES)
        self._bets = (alpha - true) / (alpha * (1.0 - alpha))  # growth-optimal against each
        self._bets[0] *= 1.0 - 1e-9  # all on no losses at all would be ruined by the first
        self._capital = np.full(len(_SHARES), 1.0 / len(_SHARES))

    @property
    def evidence(self) -> float:
        """W: proof is complete at 1 / (1 - confidence)."""
        return float(self._capital.sum())

    def audit(self, *, agreed: bool) -> bool:
        """Take in one audit and say whether agreement is proven, which stays."""
        self.audits += 1
        self.losses += not agreed
        self._capital *= 1.0 + self._bets * ((1.0 - self.agreement) - (0.0 if agreed else 1.0))
        self.passed |= self.evidence >= 1.0 / (1.0 - self.confidence)
        return self.passed
