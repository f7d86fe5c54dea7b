"""The guard: audits of early answers, and an alarm when they stop agreeing as often as was promised.

Some requests are audited: the base model answers them as well, even if they hit, off the critical path. An
audit is a loss if the classes differ. The guard bets against the promise that the share of losses is at most
`alpha` on average, whatever happened before:

    M_t = (1 + M_{t-1}) * (1 + lambda_t * (loss_t - alpha)),   M_0 = 0,   lambda_t in [0, 1/alpha)

with lambda_t chosen only from audits before t. As long as each audit is a loss with probability at
most alpha, *given everything before it*, M_t - t has no upward drift (a Shiryaev-Roberts e-detector; Shin,
Ramdas, Rinaldo 2024): the expected number of audits until M_t first reaches R is at least R, and the chance
that it does within t audits is at most t / R.

That condition is what the guard watches. Requests need not be independent, but losses may not come in bursts
either: where a loss makes the next one likelier than alpha, as in a video of one hard object, the promise is
broken for as long as the burst lasts, and the guard may stop the caches although losses stay below alpha over
the day. The requests to audit must be chosen before their answers are known.

If the true disagreement is q, the bet lambda = (q - alpha) / (alpha * (1 - alpha)) grows fastest, and the
alarm takes about ln(R) / KL(q || alpha) audits. As q is unknown, the guard splits its stake over several
values of q; M is the mean of their detectors, which is itself a detector of this kind.
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
_LARGEST_FLOAT = 1e300  # evidence is capped here to avoid overflow


def growth_optimal_bet(disagreement: float, alpha: float) -> float:
    """The lambda that makes log M grow fastest if losses occur with probability `disagreement`."""
    return max(0.0, (disagreement - alpha) / (alpha * (1.0 - alpha)))


@dataclass
class Guard:
    """Watches the agreement of early answers with the base model; alarms when it falls below `agreement`.

    `audits_to_false_alarm` is R: while the promise is kept, the expected number of audits to an alarm is at
    least that. Raises AdaptError for values out of range.
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
            raise AdaptError(f"agreement is {self.agreement!r}, must lie strictly between 0 and 1")
        if not self.audits_to_false_alarm > 1.0:
            raise AdaptError(
                f"audits_to_false_alarm is {self.audits_to_false_alarm!r}, must be above 1, for example 10000"
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
        """M: the evidence against the promise; the guard alarms at `audits_to_false_alarm`."""
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
        """Start over, for caches that were certified again."""
        self.audits = self.losses = 0
        self.alarmed = False
        self._evidence[:] = 0.0

    def to_json(self) -> dict[str, Any]:
        """The complete state, as JSON values."""
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
        """Restore the state from `to_json`. Raises KeyError, TypeError, ValueError or AdaptError."""
        guard = cls(
            float(document["agreement"]), float(document["audits_to_false_alarm"]), document["alternatives"]
        )
        evidence = np.array(document["evidence"], dtype=np.float64)
        if evidence.shape != guard._evidence.shape or not (evidence >= 0.0).all():
            raise ValueError("the evidence is invalid")
        guard._evidence = evidence
        guard.audits, guard.losses = int(document["audits"]), int(document["losses"])
        guard.alarmed = bool(document["alarmed"])
        return guard
