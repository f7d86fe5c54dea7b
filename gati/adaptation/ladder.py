"""How far memory may go: settings from strict to loose, each released once it is proven.

A setting answers inputs whose risk of a wrong answer (`gati.adaptation.risk`) is so low that, of what it
would answer, no more than a share of the tolerated disagreement is expected to be wrong. Each audit steers
that share: a loss halves it, every audit raises it a little, never above the setting's own `most`, at which
it begins; below a floor nothing is answered.

A setting's proof counts the audits of what it would have answered, and those alone, with the steering and the
learning that it will serve with: what is proven is what serves. The proof of a setting begins when the one
before is complete, which answers meanwhile. So one delta is enough for all (fixed-sequence testing): to
release a setting that is wrong too often, the first such setting of the sequence must have passed.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gati.guard.proof import Proof

__all__ = ["MOST", "Ladder", "Setting"]

MOST = (0.1, 0.3, 0.6)  # what may be expected to be wrong, as a share of the tolerated
_TARGET = 0.5  # of the tolerated disagreement, that steering aims at
_RATE = 0.7  # a loss halves what may be expected
_FLOOR = 0.02  # below it nothing is answered
_LEAST = 0.01
_HIGHEST_RISK = 0.5


class Setting:
    """One setting: `most` bounds what may be expected; `agreement` and `delta` are its proof's."""

    def __init__(self, most: float, agreement: float, delta: float) -> None:
        self._most = most
        self._tolerated = 1.0 - agreement
        self._allowed = most
        self._mean_risk: NDArray[np.float64] = np.empty(0)
        self._risks: NDArray[np.float64] = np.empty(0)
        self.threshold = 0.0  # inputs of a lower risk are answered
        self.proof = Proof(agreement, delta)

    def prove_anew(self, delta: float) -> None:
        """Begin another proof; what was learned stays."""
        self.proof = Proof(self.proof.agreement, delta)
        self._allowed = self._most
        self._place()

    def expect(self, risks: NDArray[np.float64]) -> None:
        """Take in the risks of recent inputs, rising, by which the threshold is found."""
        self._risks = risks
        self._mean_risk = np.cumsum(risks) / np.arange(1, len(risks) + 1)
        self._place()

    def audited(self, *, would_answer: bool, wrong: bool, steers: bool = True) -> None:
        """Take in an audit; `would_answer` was decided when the input was looked at.

        One that `steers` is of those that are made all the time, not only for a proof.
        """
        if steers:
            lost = would_answer and wrong
            step = _TARGET * self._tolerated - (1.0 if lost else 0.0)
            self._allowed = min(max(self._allowed * math.exp(_RATE * step), _LEAST), self._most)
            self._place()
        if would_answer and not self.proof.passed:
            self.proof.audit(agreed=not wrong)

    def _place(self) -> None:
        answered = 0
        if self._allowed >= _FLOOR:
            answered = int(np.searchsorted(self._mean_risk, self._allowed * self._tolerated))
        self.threshold = min(float(self._risks[answered - 1]), _HIGHEST_RISK) if answered else 0.0


class Ladder:
    """The settings from strict to loose; the first `released` of them are proven."""

    def __init__(self, agreement: float, delta: float) -> None:
        self._settings = tuple(Setting(most, agreement, delta) for most in MOST)
        self.released = 0

    @property
    def _running(self) -> Setting:
        """The setting whose proof is under way; the loosest once all are released."""
        return self._settings[min(self.released, len(self._settings) - 1)]

    @property
    def proof(self) -> Proof:
        """The proof under way; the last one once all settings are released."""
        return self._running.proof

    @property
    def last_proof(self) -> Proof:
        """The proof of the setting that was released last; of the strictest before."""
        return self._settings[max(0, self.released - 1)].proof

    def would_answer(self, risk: float) -> tuple[bool, bool]:
        """Whether an input of that risk is answered, and whether the setting under proof would answer it."""
        answers = self.released > 0 and risk < self._settings[self.released - 1].threshold
        return answers, risk < self._running.threshold

    def expect(self, risks: NDArray[np.float64]) -> None:
        """Take in the risks of recent inputs, rising."""
        for setting in self._settings:
            setting.expect(risks)

    def audited(self, answers: bool, would_answer: bool, *, wrong: bool, steers: bool = True) -> bool:
        """Take in an audit, of which `would_answer` spoke; whether a further setting is released with it."""
        running = self._running
        running.audited(would_answer=would_answer, wrong=wrong, steers=steers)
        if 0 < self.released < len(self._settings):
            self._settings[self.released - 1].audited(would_answer=answers, wrong=wrong, steers=steers)
        if self.released == len(self._settings) or not running.proof.passed:
            return False
        self.released += 1
        return True

    def prove_anew(self, delta: float) -> None:
        """Release nothing until it is proven again, from now on."""
        self.released = 0
        for setting in self._settings:
            setting.prove_anew(delta)
