"""Settings from strict to loose, released in that order as each is proven.

Every audit shows for every setting whether its answer would have agreed. Each setting has its own proof
(`gati.guard.proof`), and all proofs run concurrently; a setting is released when its proof is complete and
all stricter ones are released. This is a fixed sequence of tests: before any setting is released that is
wrong with at least the tolerated probability throughout, the first such setting must pass, with probability
at most delta. So one delta is enough for the whole ladder, however many settings it has. A setting that is
wrong too often for some period passes in that period with probability at most delta.

A proof that waits for those of stricter settings goes on: its setting is released only if all audits until
then prove it.

By default, audits of requests that a setting does not answer are ignored. With `of_all`, the reference
answers these requests, so the promise covers all requests and such an audit counts as agreement. In a
proof, at most as many of them count as audits of the setting's own answers: a setting that answers almost
nothing must not prove itself. The tested hypothesis is that the setting gets a request wrong with at least
the tolerated probability, so ignoring some agreements makes a proof longer, never wrong.

Released settings are guarded (`gati.guard.detector`), each by its own audits. If the one that answers is in
alarm, it is withdrawn, with all looser ones, and with stricter ones down to the first that is not in alarm.
The loosest released setting answers, unless it is not open yet: then a stricter one does. Withdrawn settings
must be proven again, with a further share of the delta that all attempts draw from
(`gati.guard.proof.Spending`).

In a new scene, the reference answers instead of settings that audits have proven. What these would have said
there is no answer that they give, and is looked at more often than what they do answer: it counts for no
proof and no guard, which would be diluted. Detectors of their own (`in_new_scene`) withdraw settings that
know nothing of such a scene before they answer in it. They can only stop; a certificate stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gati.errors import AdaptError
from gati.guard.detector import Guard
from gati.guard.proof import AT_ONCE, Duration, Proof

_RETRIED_AFTER = 10  # in multiples of the audits that perfect caches need to pass


@dataclass(frozen=True)
class Judgement:
    """A change of the settings that may answer, with the audits and losses of the setting concerned."""

    kind: Literal["released", "withdrawn"]
    audits: int
    losses: int


class Ladder:
    """The first `level` of `settings` settings, strict to loose, may answer; the last of them does.

    `proven`: all settings may answer immediately; `certified` of them have not been withdrawn since. `spend`
    gives the delta of each attempt to prove some. `of_all`: the reference answers what they do not. A proof
    `lasts` at least so long. Not thread-safe. Raises AdaptError for values that make no promise.
    """

    def __init__(
        self,
        settings: int,
        agreement: float,
        spend: Callable[[], float],
        *,
        proven: bool = False,
        of_all: bool = False,
        audits_to_false_alarm: float = 10_000.0,
        lasts: Duration = AT_ONCE,
    ) -> None:
        if settings < 1:
            raise AdaptError(f"a ladder has at least one setting, got {settings}")
        self.agreement = agreement
        self._spend, self._of_all, self._lasts = spend, of_all, lasts
        self._guards = [Guard(agreement, audits_to_false_alarm) for _ in range(settings)]
        self._scouts = [Guard(agreement, audits_to_false_alarm) for _ in range(settings)]  # of new scenes
        self._proofs: list[Proof] = []
        # audits counted by each proof of requests that its setting does not answer
        self._left = [0] * settings
        self._apart: Proof | None = None  # of the loosest setting, while `take_proofs` may replace it
        self.level = self.certified = settings if proven else 0
        self._restart(self.level)

    def __len__(self) -> int:
        return len(self._guards)

    @property
    def proof(self) -> Proof | None:
        """The proof of the next setting to release; None if all are released."""
        return None if self.level == len(self) else self._proofs[self.level]

    @property
    def guard(self) -> Guard:
        """The guard of the setting that answers, or of the strictest setting if none does."""
        return self._guards[max(0, self.level - 1)]

    def in_alarm(self, level: int) -> bool:
        """Whether the guard of the setting `level`, counted from 1, or its detector of new scenes alarms."""
        return self._guards[level - 1].alarmed or self._scouts[level - 1].alarmed

    @property
    def now_s(self) -> float:
        """The time now, on the clock of its proofs."""
        return self._lasts.clock()

    def has_evidence(self, at: int) -> bool:
        """Whether audits say something good of the setting at that index: its proof has passed, or begun."""
        return at >= self.certified and (at < self.level or self._proofs[at].audits > 0)

    def audited(
        self,
        agreed: Sequence[bool | None],
        *,
        guards: bool = True,
        tested: int | None = None,
        deployed: int = 0,
        repeated: bool = False,
        at_s: float | None = None,
    ) -> Judgement | None:
        """Record an audit of every setting: whether its answer agreed, None if it would not give one.

        With `guards` False the audit was drawn for proofs alone. Only the first `tested` settings count it.
        `repeated`: the input is a copy of the one before. `at_s` is the time of the request (`Proof.audit`).
        `deployed` is the setting that answers in place of the loosest released one, counted from 1; 0 if none
        does. Returns what changes with it.
        """
        if guards:
            for guard, each in zip(self._guards[: self.level], agreed, strict=False):
                if each is not None or self._of_all:
                    guard.audit(agreed=each is not False)
            if (alarmed := self._in_alarm(deployed)) is not None:
                return self._withdraw(alarmed, self._guards)
        for at, each in enumerate(agreed[:tested]):
            if at >= self.level:
                self._count(at, each, repeated=repeated, at_s=at_s)
        return self._release()

    def in_new_scene(self, agreed: Sequence[bool], *, deployed: int = 0) -> Judgement | None:
        """Record what settings that audits have proven would have answered in a new scene.

        The detectors are not saved: a scene is new for a few requests, and they begin anew with the next one
        just as well. Returns what changes with it.
        """
        for at in range(self.certified, self.level):
            self._scouts[at].audit(agreed=agreed[at])
        alarmed = self._in_alarm(deployed)
        return None if alarmed is None else self._withdraw(alarmed, self._scouts)

    def _in_alarm(self, deployed: int) -> int | None:
        """The setting to withdraw, as it may answer although it is in alarm; None if there is none."""
        for level in (self.level, min(deployed, self.level)):
            if level and self.in_alarm(level):
                return level
        return None

    def _count(self, at: int, agreed: bool | None, *, repeated: bool, at_s: float | None) -> None:
        """Add an audit to a setting's proof, if it counts for it."""
        proof = self._proofs[at]
        if agreed is not None:
            proof.audit(agreed=agreed, repeated=repeated, at_s=at_s)
        elif self._of_all and not repeated and 2 * self._left[at] < proof.audits:
            self._left[at] += 1
            proof.audit(agreed=True, at_s=at_s)

    def prove_anew(self) -> int | None:
        """Withdraw what audits have proven until it is proven again, on a further share of delta.

        Settings that were certified, and never withdrawn since, stay. Returns as `restrict`.
        """
        return self.restrict(self.certified)

    def certify(self, level: int) -> None:
        """Settings up to `level` need no audits to answer. Raises ValueError if they do not answer now."""
        if not 0 <= level <= self.level:
            raise ValueError(f"certified up to level {level}, but {self.level} settings answer")
        self.certified = level

    def grant(self, level: int) -> None:
        """Let the settings up to `level` answer by a certificate."""
        self.level, self.certified = max(self.level, level), level

    def restrict(self, level: int) -> int | None:
        """Withdraw all settings above `level`, whatever was certified, until they are proven again.

        So are those below that are in alarm and would answer now. Returns how many settings are left by the
        guards of all these; None if none was in alarm.
        """
        before, self.level = self.level, min(self.level, level)
        first, alarmed = self.level, [at for at in range(self.level, before) if self.in_alarm(at + 1)]
        self._leave_no_alarm()
        self._restart(self.level)
        return self.level if self.level < first else min(alarmed, default=None)

    def prove_apart(self) -> None:
        """Begin the proofs under way on a further share of delta, as another process goes on with them."""
        self._restart(self.level)
        self._apart = self._proofs[-1]

    def take_proofs(self, theirs: Ladder) -> bool:
        """Take the proofs of a process that has ended in place of those begun apart from it.

        Only if it counted more audits, and all go on here that began apart. Returns whether they were taken.
        """
        at = slice(self.level, None)
        ours, others = self._proofs[at], theirs._proofs[at]
        alike = len(theirs) == len(self) and abs(theirs.agreement - self.agreement) < 1e-9
        if not alike or not ours or ours[-1] is not self._apart or others[0].audits <= ours[0].audits:
            return False
        self._proofs[at], self._left[at] = others, theirs._left[at]
        return True

    def _release(self) -> Judgement | None:
        before = self.level
        while (proof := self.proof) is not None and proof.passed:
            self._reset(self.level)
            self.level += 1
        if self.level > before:
            proof = self._proofs[self.level - 1]
            return Judgement("released", proof.audits, proof.losses)
        if self.level and proof is not None and proof.has_taken(_RETRIED_AFTER):
            self._restart(self.level)
        return None

    def _withdraw(self, level: int, heard: Sequence[Guard]) -> Judgement:
        """Withdraw the setting `level`, which is in alarm, with all looser ones; `heard` raised it."""
        self.level, alarmed = level, heard[level - 1]
        judgement = Judgement("withdrawn", alarmed.audits, alarmed.losses)
        self._leave_no_alarm()
        self._restart(self.level)
        return judgement

    def _leave_no_alarm(self) -> None:
        """Withdraw from the setting that answers now to the loosest one that is not in alarm."""
        while self.level and self.in_alarm(self.level):
            self.level -= 1
        self.certified = min(self.certified, self.level)

    def _restart(self, first: int) -> None:
        """Restart the proofs of all settings from `first` on; proofs of released settings are kept."""
        if not self._proofs:
            self._proofs = [Proof(self.agreement, 0.5) for _ in self._guards]  # not used while released
        if first == len(self):
            return
        delta = self._spend()
        for at in range(first, len(self)):
            self._proofs[at] = Proof(self.agreement, delta, self._lasts)
            self._left[at] = 0
            self._reset(at)

    def _reset(self, at: int) -> None:
        """What was heard of a setting says nothing about how it answers from now on."""
        self._guards[at].reset()
        self._scouts[at].reset()

    def to_json(self) -> dict[str, Any]:
        """The complete state, as JSON values."""
        return {
            "level": self.level,
            "guards": [guard.to_json() for guard in self._guards],
            "proofs": [proof.to_json() for proof in self._proofs],
        } | ({"left": list(self._left)} if self._of_all else {})

    @classmethod
    def from_json(
        cls, document: Mapping[str, Any], *, spend: Callable[[], float], lasts: Duration = AT_ONCE
    ) -> Ladder:
        """Restore the state from `to_json`, without spending any delta.

        Raises KeyError, TypeError, ValueError or AdaptError for what `to_json` did not write.
        """
        guards = [Guard.from_json(each) for each in document["guards"]]
        proofs = [Proof.from_json(each, lasts) for each in document["proofs"]]
        level = int(document["level"])
        if not guards or len(guards) != len(proofs) or not 0 <= level <= len(guards):
            raise ValueError(f"level {level} does not fit {len(guards)} guards and {len(proofs)} proofs")
        if level and guards[level - 1].alarmed:
            raise ValueError("the guard is in alarm, but the caches serve")
        if len({guard.agreement for guard in guards} | {proof.agreement for proof in proofs[level:]}) != 1:
            raise ValueError("the settings of a ladder must share one promise")
        rate = guards[0].audits_to_false_alarm
        ladder = cls(
            len(guards),
            guards[0].agreement,
            spend,
            proven=True,
            audits_to_false_alarm=rate,
            lasts=lasts,
        )
        ladder.level, ladder._guards, ladder._proofs = level, guards, proofs
        ladder.certified = 0
        if "left" in document:
            ladder._of_all = True
            ladder._left = [int(each) for each in document["left"]]
            if any(not 0 <= left <= of.audits for left, of in zip(ladder._left, proofs, strict=True)):
                raise ValueError(f"left is {ladder._left}, which does not fit the proofs")
        return ladder
