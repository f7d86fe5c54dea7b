"""Which settings of memory may answer: they are released from strict to loose as audits prove them.

Memory has one ladder for each of two cases:

- Caches answer the requests that memory does not, at least outside of new scenes. Memory keeps the promise on
  its own answers and the caches keep it on the rest, so all answers keep it. Only audits of answers that a
  setting gives, or would give, count.
- Memory is `alone`: the reference answers the other requests, and not only in new scenes, and is right by
  definition. Memory may then be wrong on the tolerated share of *all requests*. The certificate of
  `gati compose` counts in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.adaptation.recall_settings import MOST, RecallSetting
from gati.guard.ladder import Judgement, Ladder
from gati.guard.proof import Proof

_MEMORY = 0.99  # decay of the running share of requests that may be answered


class Intent(NamedTuple):
    """What each setting would do with an input, as of `epoch`.

    `confident`: the loosest released setting answers it; `known`: a released or tested setting would.
    `meant`: the loosest setting would, if inputs as far away had been checked. `takes`: the loosest released
    setting would, or without one the strictest.
    """

    would_answer: tuple[bool, ...]
    confident: bool
    known: bool
    epoch: int
    meant: bool
    takes: bool


class RecallLadder:
    """The settings of a memory, and which of them are proven. Not thread-safe.

    `agreement` is the promise, `spend` returns the delta of each attempt to prove settings,
    `audits_to_false_alarm` is the guard's.
    """

    def __init__(
        self,
        agreement: float,
        spend: Callable[[], float],
        audits_to_false_alarm: float = 10_000.0,
        *,
        alone: bool,
        known: Mapping[str, Any] | None = None,
    ) -> None:
        self.alone = alone
        self.share = 0.0  # of all recent requests that the released settings answer
        self._settings = tuple(RecallSetting(most, agreement, of_all=alone) for most in MOST)
        self._epoch = 0  # audits of requests from an earlier epoch prove nothing
        if known is None:
            self._ladder = Ladder(
                len(MOST), agreement, spend, of_all=alone, audits_to_false_alarm=audits_to_false_alarm
            )
            return
        self._ladder = Ladder.from_json(known["ladder"], spend=spend)
        if ("left" in known["ladder"]) != alone:
            raise ValueError(f"it was saved with alone={not alone}, but alone is {alone} now")
        if len(self._ladder) != len(MOST) or abs(self._ladder.agreement - agreement) > 1e-9:
            raise ValueError("its settings or its promise differ")
        for setting, allowed in zip(self._settings, known["allowed"], strict=True):
            setting.steer_from(float(allowed))

    @property
    def level(self) -> int:
        """The number of settings that may answer."""
        return self._ladder.level

    @property
    def proof(self) -> Proof | None:
        """The proof of the next setting to release; None if all are released."""
        return self._ladder.proof

    @property
    def tested(self) -> int:
        """The number of settings released or tested: only the strictest one until it is released.

        Testing all of them would slow down learning at first.
        """
        return len(self._settings) if self.level else 1

    @property
    def highest_risk(self) -> float:
        """The loosest setting answers inputs of a lower risk."""
        return self._settings[-1].threshold

    def judge(self, risk: float, *, covered: bool = True, asked: bool = True) -> Intent:
        """What the settings do with an input whose remembered answer is wrong with probability `risk`.

        `covered`: inputs as far away have been checked. `asked` False: memory must not answer this one.
        """
        would = tuple(covered and risk < setting.threshold for setting in self._settings)
        confident = self.level > 0 and would[self.level - 1]
        if asked:
            self.share += (1.0 - _MEMORY) * (confident - self.share)
        meant = risk < self.highest_risk
        takes = would[max(self.level - 1, 0)]
        return Intent(would, confident, any(would[: self.tested]), self._epoch, meant, takes)

    def passed(self) -> None:
        """Count a request that is not looked up: it is left, too."""
        self.share *= _MEMORY

    def audited(
        self, intent: Intent, *, wrong: bool, steers: bool, repeated: bool = False
    ) -> Judgement | None:
        """Count an audit for guards and proofs; returns what changes.

        `wrong`: the remembered answer was wrong. `steers`: it is a regular audit, not one for proofs only.
        `repeated`: its place showed the same just before.
        """
        if intent.epoch != self._epoch:
            return None
        tested, before = self.tested, self.level
        if steers:
            for setting, would in zip(self._settings[:tested], intent.would_answer, strict=False):
                setting.audited(would_answer=would, wrong=wrong)
        agreed = [not wrong if would else None for would in intent.would_answer]
        found = self._ladder.audited(agreed, guards=steers, tested=tested, repeated=repeated)
        if found is not None and (found.kind == "withdrawn" or before == 0):
            self._begin_anew()
        return found

    def prove_apart(self) -> None:
        """Begin the proofs under way on a further share of delta, as another process goes on with them."""
        self._ladder.prove_apart()
        self._epoch += 1

    def restrict(self, level: int) -> bool:
        """Withdraw all settings above `level` until they are proven again; returns whether there were any.

        So are those below that are in alarm and would answer now.
        """
        if level >= self.level:
            return False
        self._ladder.restrict(level)
        self._begin_anew()
        return True

    def _begin_anew(self) -> None:
        """What may not answer has other proofs from now on, and begins as loose as it may be."""
        self._epoch += 1
        for setting in self._settings[self.level :]:
            setting.begin()

    def expect(self, risks: NDArray[np.float64]) -> None:
        """Update the thresholds from the risks of recent inputs, in ascending order."""
        for setting in self._settings:
            setting.expect(risks)

    def state(self) -> dict[str, Any]:
        """The proofs and the steering of the settings, as JSON values."""
        allowed = [setting.allowed for setting in self._settings]
        return {"ladder": self._ladder.to_json(), "allowed": allowed}
