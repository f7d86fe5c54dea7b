"""A sequential test of whether unproven caches may answer, valid when it is checked after every audit.

The certificate of `gati compose` counts a fixed number of inputs once. Audits arrive one by one, and waiting
until the count looks good would be repeated testing. So the evidence is the capital of a gambler who bets
that losses are rarer than the tolerated share `alpha`:

    W_t = W_{t-1} * (1 + lambda * (alpha - loss_t)),   W_0 = 1,   lambda in [0, 1/(1 - alpha))

If each audit is a loss with probability alpha or more, whatever happened before, W is a supermartingale, and
the chance that it ever reaches 1/delta is at most delta (Ville's inequality). The stake is split over several
lambdas. A complete proof therefore rejects this hypothesis: "every audit of the proof was a loss with
probability at least alpha".

Copies of one input are no further evidence: what follows from the first of them is no bet. But the promise is
about all requests, and inputs that stay may be those that caches get wrong. So a complete proof has enough
evidence twice, without copies and with them.

One proof errs with probability delta; several proofs on one stream err with at most the sum of their deltas.
`Spending` hands out shares of one delta that never add up to more: the k-th is delta / (k * (k + 1)).

Audits of a moment say little about the next: frames of a video are alike. So a proof can be required to take
some time (`Duration`), and is complete when the evidence suffices after that time. It may wait, as W may.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import AdaptError

_PATIENCE = 3  # in multiples of the audits that perfect caches need to pass
_MOST_PATIENCE = 10
_PROMISING = 0.75  # share of the tolerated losses
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)  # assumed true disagreement, as shares of the tolerated one


@dataclass(frozen=True)
class Duration:
    """The requests of a proof come over at least `least_s` seconds of `clock`."""

    least_s: float = 0.0
    clock: Callable[[], float] = time.monotonic


AT_ONCE = Duration()


@dataclass
class Proof:
    """Collects audits of caches that do not answer yet; `passed` if they prove agreement at level `delta`.

    `lasts` is how long that takes at least. `audits` and `losses` leave out `copies` of the input before, of
    which `wrong_copies` were losses. Raises AdaptError for values out of range.
    """

    agreement: float
    delta: float = 0.05
    lasts: Duration = AT_ONCE
    audits: int = field(default=0, init=False)
    losses: int = field(default=0, init=False)
    copies: int = field(default=0, init=False)
    wrong_copies: int = field(default=0, init=False)
    passed: bool = field(default=False, init=False)
    _ripe: bool = field(init=False, repr=False)  # it has taken long enough
    _began_s: float | None = field(default=None, init=False, repr=False)
    _bets: NDArray[np.float64] = field(init=False, repr=False)
    _grown: tuple[NDArray[np.float64], NDArray[np.float64]] = field(init=False, repr=False)  # agreed, loss
    _log_capital: NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, value in (("agreement", self.agreement), ("delta", self.delta)):
            if not 0.0 < value < 1.0:
                raise AdaptError(f"{name} is {value!r}, must lie strictly between 0 and 1, for example 0.05")
        self._ripe = not self.lasts.least_s
        alpha = 1.0 - self.agreement
        true = alpha * np.array(_SHARES)
        self._bets = (alpha - true) / (alpha * (1.0 - alpha))  # growth-optimal against each
        self._bets[0] *= 1.0 - 1e-9  # a full bet on no losses would be ruined by the first one
        self._grown = np.log1p(self._bets * alpha), np.log1p(self._bets * (alpha - 1.0))
        self._log_capital = np.full(len(_SHARES), -math.log(len(_SHARES)))

    @property
    def log_evidence(self) -> float:
        """log W, without copies or with them, whichever is less: the proof is complete at log(1 / delta)."""
        without = float(np.logaddexp.reduce(self._log_capital))
        if not self.copies:
            return without
        agreed, loss = self._grown
        of_copies = (self.copies - self.wrong_copies) * agreed + self.wrong_copies * loss
        return min(without, float(np.logaddexp.reduce(self._log_capital + of_copies)))

    @property
    def worse_than_none(self) -> bool:
        """Whether a proof that begins now has less to make up for."""
        return self.log_evidence < 0.0 and self.audits + self.wrong_copies > 0

    @cached_property
    def required(self) -> int:
        """Number of audits that complete the proof from the start if none is a loss."""
        grown, _ = self._grown
        begin, wanted = -math.log(len(_SHARES)), -math.log(self.delta)
        most = math.ceil((wanted - begin) / float(grown.max())) + 1
        return bisect_left(
            range(most), wanted, lo=1, key=lambda audits: float(np.logaddexp.reduce(begin + audits * grown))
        )

    @property
    def how_far(self) -> str:
        """Progress as readable text: `0.99: 212 of about 454 audits`."""
        said = f"{self.agreement:g}: {self.audits} of about {self.required} audits"
        waits = not self._ripe and self.audits >= self.required
        return f"{said} in at least {self.lasts.least_s:g} s" if waits else said

    def has_taken(self, times: int) -> bool:
        """Whether it has taken `times` the audits that perfect caches need, and long enough."""
        return self._ripe and self.audits >= times * self.required

    @property
    def hopeless(self) -> bool:
        """Whether it has failed after three times the audits that perfect caches need.

        Where clearly fewer were losses than is tolerated, it may take up to ten times.
        """
        few = _PROMISING * (1.0 - self.agreement)  # without copies and with them
        promising = self.losses <= few * self.audits
        promising &= self.losses + self.wrong_copies <= few * (self.audits + self.copies)
        return self.has_taken(_MOST_PATIENCE if promising else _PATIENCE)

    def audit(self, *, agreed: bool, repeated: bool = False, at_s: float | None = None) -> bool:
        """Record one audit, of a copy if `repeated`. Returns whether all audits so far prove agreement.

        `at_s` is the time of the request, on the clock of `lasts`; by default now.
        """
        if repeated:
            self.copies += 1
            self.wrong_copies += not agreed
        else:
            self.audits += 1
            self.losses += not agreed
            self._log_capital += self._grown[not agreed]
            self._ripe = self._ripe or self._is_ripe(self.lasts.clock() if at_s is None else at_s)
        self.passed = self._ripe and self.log_evidence >= -math.log(self.delta)
        return self.passed

    def _is_ripe(self, at_s: float) -> bool:
        if self._began_s is None or at_s < self._began_s:  # the clock was set back
            self._began_s = at_s
        return at_s - self._began_s >= self.lasts.least_s

    def to_json(self) -> dict[str, Any]:
        """The complete state, as JSON values."""
        return {
            "agreement": self.agreement,
            "delta": self.delta,
            "audits": self.audits,
            "losses": self.losses,
            "copies": [self.copies, self.wrong_copies],
            "passed": self.passed,
            "log_capital": self._log_capital.tolist(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], lasts: Duration = AT_ONCE) -> Proof:
        """Restore the state from `to_json`; its time begins anew, unless it has passed.

        Raises KeyError, TypeError, ValueError or AdaptError.
        """
        proof = cls(float(document["agreement"]), float(document["delta"]), lasts)
        capital = np.array(document["log_capital"], dtype=np.float64)
        if capital.shape != proof._log_capital.shape or np.isnan(capital).any():
            raise ValueError("log_capital is out of range")
        proof._log_capital = capital
        proof.audits, proof.losses = int(document["audits"]), int(document["losses"])
        proof.copies, proof.wrong_copies = (int(each) for each in document.get("copies", (0, 0)))
        if not 0 <= proof.wrong_copies <= proof.copies:
            raise ValueError(f"{proof.wrong_copies} of {proof.copies} copies are out of range")
        proof.passed = bool(document["passed"])
        proof._ripe = proof._ripe or proof.passed
        return proof


class Spending:
    """Hands out shares of `delta`: the k-th is delta / (k * (k + 1)). Their sum never exceeds delta.

    `used` is the number of shares handed out so far. Several processes may each have an equal part of one
    delta: all of them take the same shares of their parts, so these add up to at most that delta, too. Where
    the size of a part has changed, every share is taken by parts of one size only (`begin_after`): those up
    to number `since` may have been of another size. Raises AdaptError for a delta outside (0, 1).
    """

    def __init__(self, delta: float, used: int = 0) -> None:
        if not 0.0 < delta < 1.0:
            raise AdaptError(f"delta is {delta!r}, must lie strictly between 0 and 1, for example 0.05")
        self.delta = delta
        self.used = max(0, used)
        self.since = 0

    def begin_after(self, number: int) -> None:
        """Hand out no share up to that number: parts of another size may have taken it."""
        self.since = max(self.since, number)
        self.used = max(self.used, number)

    def next(self) -> float:
        """The next share."""
        self.used += 1
        return self.delta / (self.used * (self.used + 1))
