"""May caches that are not trusted yet answer? A test that may be looked at after every audit.

The certificate of `gati compose` counts a fixed number of inputs once. Audits come one by one, and to wait
until the count looks right is to test many times. So the evidence is the capital of a gambler who bets that
losses are rarer than the tolerated share `alpha`:

    W_t = W_{t-1} * (1 + lambda * (alpha - loss_t)),   W_0 = 1,   lambda in [0, 1/(1 - alpha))

If each audit is a loss with probability alpha or more, whatever happened before, W is a supermartingale, and
the chance that it ever reaches 1/delta is at most delta (Ville's inequality). The stake is split over several
lambdas. What is proven is therefore: it is not so that every audit of the proof was a loss with at least that
probability.

One proof errs with probability delta, many proofs of one stream with the sum of theirs. `Spending` hands out
shares of one delta that never add up to more: the k-th is delta / (k * (k + 1)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import AdaptError

_PATIENCE = 3  # times the audits that perfect caches need to pass
_MOST_PATIENCE = 10
_PROMISING = 0.75  # of the tolerated losses
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)  # of the tolerated disagreement: what the true one may be


@dataclass
class Proof:
    """Collects audits of caches that do not answer yet; `passed` once agreement is proven at level `delta`.

    Raises AdaptError for values that make no promise.
    """

    agreement: float
    delta: float = 0.05
    audits: int = field(default=0, init=False)
    losses: int = field(default=0, init=False)
    passed: bool = field(default=False, init=False)
    _bets: NDArray[np.float64] = field(init=False, repr=False)
    _grown: tuple[NDArray[np.float64], NDArray[np.float64]] = field(init=False, repr=False)  # agreed, loss
    _log_capital: NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, value in (("agreement", self.agreement), ("delta", self.delta)):
            if not 0.0 < value < 1.0:
                raise AdaptError(f"{name} is {value!r}, must lie strictly between 0 and 1, for example 0.05")
        alpha = 1.0 - self.agreement
        true = alpha * np.array(_SHARES)
        self._bets = (alpha - true) / (alpha * (1.0 - alpha))  # growth-optimal against each
        self._bets[0] *= 1.0 - 1e-9  # all on no losses at all would be ruined by the first
        self._grown = np.log1p(self._bets * alpha), np.log1p(self._bets * (alpha - 1.0))
        self._log_capital = np.full(len(_SHARES), -math.log(len(_SHARES)))

    @property
    def log_evidence(self) -> float:
        """log W: the proof is complete at log(1 / delta)."""
        return float(np.logaddexp.reduce(self._log_capital))

    @cached_property
    def required(self) -> int:
        """How many audits without any loss complete the proof from the beginning."""
        grown, _ = self._grown
        begin, wanted = -math.log(len(_SHARES)), -math.log(self.delta)
        low, high = 0, math.ceil((wanted - begin) / float(grown.max())) + 1
        while high - low > 1:
            middle = (low + high) // 2
            enough = float(np.logaddexp.reduce(begin + middle * grown)) >= wanted
            low, high = (low, middle) if enough else (middle, high)
        return high

    @property
    def how_far(self) -> str:
        """For people: `0.99: 212 of about 300 audits`."""
        return f"{self.agreement:g}: {self.audits} of about {self.required} audits"

    @property
    def hopeless(self) -> bool:
        """Whether it has failed after three times the audits that perfect caches need.

        Where clearly fewer were losses than is tolerated, it may take up to ten times.
        """
        promising = self.losses <= _PROMISING * (1.0 - self.agreement) * self.audits
        return self.audits >= (_MOST_PATIENCE if promising else _PATIENCE) * self.required

    def audit(self, *, agreed: bool) -> bool:
        """Take in one audit and say whether agreement is proven, which stays."""
        self.audits += 1
        self.losses += not agreed
        self._log_capital += self._grown[not agreed]
        self.passed |= self.log_evidence >= -math.log(self.delta)
        return self.passed

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "agreement": self.agreement,
            "delta": self.delta,
            "audits": self.audits,
            "losses": self.losses,
            "passed": self.passed,
            "log_capital": self._log_capital.tolist(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Proof:
        """Go on where `to_json` was called. Raises KeyError, TypeError, ValueError or AdaptError."""
        proof = cls(float(document["agreement"]), float(document["delta"]))
        capital = np.array(document["log_capital"], dtype=np.float64)
        if capital.shape != proof._log_capital.shape or np.isnan(capital).any():
            raise ValueError("log_capital is not that of a proof")
        proof._log_capital = capital
        proof.audits, proof.losses = int(document["audits"]), int(document["losses"])
        proof.passed = bool(document["passed"])
        return proof


class Spending:
    """Hands out shares of `delta`, the k-th delta / (k * (k + 1)), which add up to no more than delta.

    `used` says how many were handed out before. Raises AdaptError for a delta outside (0, 1).
    """

    def __init__(self, delta: float, used: int = 0) -> None:
        if not 0.0 < delta < 1.0:
            raise AdaptError(f"delta is {delta!r}, must lie strictly between 0 and 1, for example 0.05")
        self.delta = delta
        self.used = max(0, used)

    def next(self) -> float:
        """The next share."""
        self.used += 1
        return self.delta / (self.used * (self.used + 1))
