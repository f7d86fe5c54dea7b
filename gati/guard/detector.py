"""The guard: audits of early answers, and an alarm when they stop agreeing as often as was promised.

Some requests are audited: the base model answers those that hit, too, off the critical path. Each audit is a
loss (the classes differ) or none. The guard bets against the promise that losses are no more
than the tolerated share `alpha` on average, whatever happened before:

    M_t = (1 + M_{t-1}) * (1 + lambda_t * (loss_t - alpha)),   M_0 = 0,   lambda_t in [0, 1/alpha)

with lambda_t chosen from what was seen before audit t. As long as each audit is a loss with probability at
most alpha, *given everything before it*, M_t - t has no upward drift (a Shiryaev-Roberts e-detector; Shin,
Ramdas, Rinaldo 2024): the expected number of audits until M_t first reaches R is at least R, and the chance
that it does within t audits is at most t / R.

That condition is what the guard watches. Requests need not be independent, but losses may not come in bursts
either: where a loss makes the next one likelier than alpha, as in a video of one hard object, the promise is
broken for as long as the burst lasts, and the guard may stop the caches although losses stay below alpha over
the day. It asks, too, that which requests are audited was decided before their answers were known.

A bet against the disagreement q grows the fastest with lambda = (q - alpha) / (alpha * (1 - alpha)) if q is
what comes; the alarm then takes about ln(R) / KL(q || alpha) audits. As q is not known, the guard splits its
stake over several, and M is the mean of theirs, which is a detector of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import AdaptError

_ALTERNATIVES = (1.5, 2.5, 5.0, 10.0, 20.0)  # disagreements bet against, in multiples of the tolerated one
_LARGEST_ALTERNATIVE = 0.9
_LARGEST_FLOAT = 1e300  # beyond it nothing is left to be said


def growth_optimal_bet(disagreement: float, alpha: float) -> float:
    """The lambda under which log M grows the fastest if losses come with probability `disagreement`."""
    return max(0.0, (disagreement - alpha) / (alpha * (1.0 - alpha)))


@dataclass
class Guard:
    """Watches the agreement of early answers with the base model; alarms when it falls below `agreement`.

    `audits_to_false_alarm` is R: while the promise is kept, the expected number of audits to an alarm is at
    least that. Raises AdaptError for values that make no promise.
    """

    agreement: float
    audits_to_false_alarm: float = 10_000.0
    alternatives: Sequence[float] | None = None  # disagreements to bet against; None takes a spread
    audits: int = field(default=0, init=False)
    losses: int = field(default=0, init=False)
    alarmed: bool = field(default=False, init=False)
    _bets: NDArray[np.float64] = field(init=False, repr=False)
    _evidence: NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.agreement < 1.0:
            raise AdaptError(f"agreement is {self.agreement!r}, must lie strictly between 0 and 1, as 0.97")
        if not self.audits_to_false_alarm > 1.0:
            raise AdaptError(
                f"audits_to_false_alarm is {self.audits_to_false_alarm!r}, must be above 1, as 10000"
            )
        alpha = self.alpha
        largest = _LARGEST_ALTERNATIVE if alpha < _LARGEST_ALTERNATIVE else 1.0
        against = self.alternatives or sorted(
            {min(multiple * alpha, (largest + alpha) / 2.0) for multiple in _ALTERNATIVES}
        )
        if not all(alpha < each < 1.0 for each in against):
            raise AdaptError(f"alternatives must lie between {alpha:g} and 1, got {list(against)}")
        self._bets = np.array([growth_optimal_bet(each, alpha) for each in against])
        self._evidence = np.zeros(len(self._bets))

    @property
    def alpha(self) -> float:
        """The tolerated share of disagreement."""
        return 1.0 - self.agreement

    @property
    def evidence(self) -> float:
        """M: how much speaks against the promise; the alarm is at `audits_to_false_alarm`."""
        return float(self._evidence.mean())

    def audit(self, *, agreed: bool) -> bool:
        """Take in one audit and say whether the guard is in alarm, which stays until `reset`."""
        self.losses += not agreed
        return self.observe(0.0 if agreed else 1.0)

    def observe(self, loss: float) -> bool:
        """As `audit`, of a loss from 0 to 1 whose mean is promised to be at most `alpha`."""
        self.audits += 1
        payoff = 1.0 + self._bets * (loss - self.alpha)
        self._evidence = np.minimum((1.0 + self._evidence) * payoff, _LARGEST_FLOAT)
        self.alarmed |= self.evidence >= self.audits_to_false_alarm
        return self.alarmed

    def reset(self) -> None:
        """Begin anew, for caches that were certified again."""
        self.audits = self.losses = 0
        self.alarmed = False
        self._evidence[:] = 0.0

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "agreement": self.agreement,
            "audits_to_false_alarm": self.audits_to_false_alarm,
            "alternatives": None if self.alternatives is None else list(self.alternatives),
            "audits": self.audits,
            "losses": self.losses,
            "alarmed": self.alarmed,
            "evidence": self._evidence.tolist(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Guard:
        """Go on where `to_json` was called. Raises KeyError, TypeError, ValueError or AdaptError."""
        guard = cls(
            float(document["agreement"]), float(document["audits_to_false_alarm"]), document["alternatives"]
        )
        evidence = np.array(document["evidence"], dtype=np.float64)
        if evidence.shape != guard._evidence.shape or not (evidence >= 0.0).all():
            raise ValueError("evidence is not that of a guard")
        guard._evidence = evidence
        guard.audits, guard.losses = int(document["audits"]), int(document["losses"])
        guard.alarmed = bool(document["alarmed"])
        return guard
