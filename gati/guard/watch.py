"""Proving one version before it serves, and guarding it while it does: one watch per version.

A version is `serving`, on `probation` because nothing is proven of it yet, or `stopped` by the guard. It has
one or more settings, from strict to loose, and serves with the loosest that is proven (`gati.guard.ladder`).
Each audit counts for the guards of proven settings and for the proofs of the others, which are judged by what
they would have answered. A setting in alarm stops immediately, and a stricter one answers, if any may.

Evidence is never discarded for a free retry: proofs continue whatever happens to other versions, and across
restarts (`to_json`, `from_json`). New proofs begin when proven settings are withdrawn, when the old ones have
failed, or in another scene. Each takes a further share of delta, so together they err with at most delta.

Where memory answers the easy requests, evidence is of what it leaves (`gati.guard.left_requests`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gati.guard.ladder import Judgement, Ladder
from gati.guard.left_requests import LeftRequests
from gati.guard.proof import AT_ONCE, Duration, Proof
from gati.guard.withdrawals import Withdrawal, withdrawals_in

State = Literal["serving", "probation", "stopped"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """A change of the settings that may answer, with its audits and losses, for logs, metrics and pages.

    `level` is the number of proven settings from then on; `tightened`: some were withdrawn.
    """

    state: State
    audits: int
    losses: int
    level: int = 1
    tightened: bool = False


OnEvent = Callable[[Event], None]


class Watch:
    """Decides, audit by audit, whether the caches of one version may answer, and by which of their settings.

    `proven` caches serve immediately: a certificate covers the promise. Others are on probation. `spend`
    returns the delta of the next proof, like `Spending.next`; each proof `lasts` at least so long.
    `on_event` is called with each change. Not thread-safe.

    Read `may_hit` before a request and call `audited` once the reference's class is known, for requests that
    were drawn before their answers were known. `epoch` counts the changes of state: an audit that was drawn
    in another epoch does not count.
    """

    def __init__(
        self,
        agreement: float,
        *,
        spend: Callable[[], float],
        proven: bool,
        settings: int = 1,
        audits_to_false_alarm: float = 10_000.0,
        lasts: Duration = AT_ONCE,
        on_event: OnEvent | None = None,
    ) -> None:
        self._ladder = Ladder(
            settings,
            agreement,
            spend,
            proven=proven,
            audits_to_false_alarm=audits_to_false_alarm,
            lasts=lasts,
        )
        self._on_event = on_event
        self.state: State = "serving" if proven else "probation"
        self.epoch = 0
        self.audits = self.losses = 0  # while serving, since the version began
        self.proven_on = 0  # audits of the last proof; 0 if a certificate, or nothing, lets it serve
        self.certifiable = settings  # that a certificate may let answer: what guards withdrew must be proven
        self.withdrawals: tuple[Withdrawal, ...] = ()  # by its guard; of earlier ones, those that left fewer
        self._left = LeftRequests(settings)
        self.on_restart: Callable[[], None] | None = None  # called when the watch begins proofs anew

    @property
    def agreement(self) -> float:
        """The promised agreement."""
        return self._ladder.agreement

    @property
    def settings(self) -> int:
        """The number of settings."""
        return len(self._ladder)

    @property
    def level(self) -> int:
        """The number of proven settings, counted from the strictest; the last of them may answer."""
        return self._ladder.level

    @property
    def certified(self) -> int:
        """The number of settings that a certificate covers and no guard has withdrawn since."""
        return self._ladder.certified

    @property
    def withdrawn_to(self) -> int | None:
        """The fewest settings that its guard ever left; None if all."""
        return self.withdrawals[0].left if self.withdrawals else None

    @property
    def may_hit(self) -> bool:
        """Whether early answers may be given."""
        return self.state == "serving"

    @property
    def proof(self) -> Proof | None:
        """The proof of the next setting; None if all are proven."""
        return self._ladder.proof

    @property
    def now_s(self) -> float:
        """The time now, on the clock of proofs."""
        return self._ladder.now_s

    def in_alarm(self, level: int) -> bool:
        """Whether the guard of the setting `level`, counted from 1, is in alarm."""
        return self._ladder.in_alarm(level)

    def audited(
        self,
        *,
        agreed: bool | Sequence[bool],
        proves: bool = True,
        deployed: int = 0,
        repeated: bool = False,
        at_s: float | None = None,
    ) -> None:
        """Record an audit of this epoch: whether the answer of each setting, given or not, agrees.

        Pass one bool for a version with one setting. A request that misses agrees, unless the network's own
        answer differs from the reference's. `proves` False: it counts for guards only, as settings that are
        not proven yet were not looked up, or would not answer there even if they were proven. `deployed` is
        the setting that answers, if the loosest proven one is not open, else 0. `repeated`: of a copy.
        `at_s` is the time of the request: `now_s` then, by default now.
        """
        each = (agreed,) if isinstance(agreed, bool) else tuple(agreed)
        level = self.level
        if proves:
            self._count_left()
        if level:
            self.audits += 1
            self.losses += not each[(deployed or level) - 1]
        tested = None if proves else level
        found = self._ladder.audited(each, tested=tested, deployed=deployed, repeated=repeated, at_s=at_s)
        self._judged(found)

    def tried(self, agreed: Sequence[bool], *, repeated: bool = False, at_s: float | None = None) -> None:
        """As `audited`, of a request that has no answer: it counts for settings that are not proven yet."""
        self._count_left()
        self._judged(self._ladder.audited(agreed, guards=False, repeated=repeated, at_s=at_s))

    def _judged(self, judged: Judgement | None) -> None:
        """An audit was recorded, which changed that."""
        if judged is None:
            proof = self.proof
            if self.state == "stopped" and proof is not None and proof.hopeless:
                self.prove_anew()
        elif judged.kind == "released":
            self.proven_on = judged.audits
            self._change("serving", judged.audits, judged.losses)
        else:
            self._withdrawn(judged)

    def in_new_scene(self, agreed: Sequence[bool], *, deployed: int = 0) -> None:
        """Record what each setting would have answered in a new scene, where the reference answers instead.

        It is evidence for nothing, but settings that are wrong there stop before they answer there
        (`gati.guard.ladder`). `deployed` as for `audited`.
        """
        judged = self._ladder.in_new_scene(agreed, deployed=deployed)
        if judged is not None:
            self._withdrawn(judged)

    def prove_anew(self) -> None:
        """Begin another proof with a further share of delta, unless the current one is better than none.

        What was proven on other requests stops. Settings that a certificate covers, and that were never
        withdrawn, stay.
        """
        proof = self.proof
        if self.level == 0 and proof is not None and not proof.worse_than_none:
            return
        self._restarted(self._ladder.prove_anew())

    def restrict(self, level: int) -> None:
        """Begin other proofs of the settings above `level`: another guard found them wrong.

        Neither what was proven here nor a certificate lets them answer.
        """
        self.certifiable = min(self.certifiable, level)
        if level < self.level:
            self._restarted(self._ladder.restrict(level))

    def revoke(self) -> None:
        """Begin proofs of all settings: there is no certificate any more, or none as sure as is asked."""
        self._restarted(self._ladder.restrict(0))

    def certify(self) -> None:
        """Let the settings answer that a certificate covers, except what a guard has withdrawn."""
        if self.certifiable > self.certified:
            self._ladder.grant(self.certifiable)
            self._certified_only()
            self.state = "serving"
            self.epoch += 1

    def take_over(self, before: Watch) -> None:
        """Keep what guards found of the same caches under another promise, or with other settings."""
        same, bound = before.settings == self.settings, before.certifiable
        self.withdrawals = before.withdrawals
        if not same:  # which of its settings they found wrong is not known
            self.withdrawals = tuple(each._replace(left=0) for each in before.withdrawals[-1:])
            bound = self.settings if bound == before.settings else 0
        self.restrict(bound)

    def prove_apart(self) -> None:
        """Begin the proofs under way on a further share of delta, as another process goes on with them.

        What may answer stays.
        """
        if self.proof is not None:
            self._ladder.prove_apart()
            self._restarted()

    def take_proofs(self, theirs: Watch) -> None:
        """Go on with proofs of that process once it has ended, if it counted more audits than there are here.

        All have a share of delta of their own, so it does not matter which are taken.
        """
        if self._ladder.take_proofs(theirs._ladder):
            self._left.take(theirs._left, self.level)
            self._restarted()

    def bring_back(self) -> None:
        """Withdraw proofs by audits, which were made on other requests. A certificate stays valid."""
        if self.may_hit and self.proven_on:
            self.prove_anew()

    def forget(self) -> None:
        """Forget the good evidence so far: all proofs start over, including completed ones.

        A certificate stays valid. Stops, and the guard's evidence against certified caches, are kept.
        """
        proof = self.proof
        if self.proven_on or (proof is not None and proof.audits):
            self.begin_anew()

    def begin_anew(self) -> None:
        """As `forget`, also if there is no evidence: proofs that have just begun are of a delta of before."""
        if self.proven_on or self.proof is not None:
            self._restarted(self._ladder.prove_anew())

    def left_by(self, memory_level: int) -> bool:
        """From now on, memory leaves the requests by its setting `memory_level`.

        Returns whether good evidence was forgotten: that of settings with audits of requests which a stricter
        one left, among which there are easier ones. Next to that stricter one, what is proven stays.
        """
        before, self._left.now = self._left.now, memory_level
        if before is not None and memory_level <= before:
            return False
        for at in self._evidence():
            if self._left.are_easier(at, memory_level):
                self._restarted(self._ladder.restrict(at))  # looser settings were proven no earlier
                return True
        if before is not None:
            self.epoch += 1  # audits under way are of easier requests
        return False

    def _count_left(self) -> None:
        """A request is counted by the proofs under way."""
        self._left.count(range(self.level, self.settings))

    def _evidence(self) -> list[int]:
        """The indices of the settings of which audits say something good."""
        return [at for at in range(self.settings) if self._ladder.has_evidence(at)]

    def _restarted(self, left: int | None = None) -> None:
        """Proofs begin anew, and fewer settings may answer; `left`: as many as the guard left, if it did."""
        if left is not None:
            _log.warning("settings were in alarm while another answered; %d are left by the guard", left)
            self._note_withdrawal(left)
        self._certified_only()
        if self.state == "serving" and not self.level:
            self.state = "stopped" if left == 0 else "probation"
        self.epoch += 1
        if self.on_restart is not None:
            self.on_restart()

    def _withdrawn(self, judged: Judgement) -> None:
        """Some settings were withdrawn as they are wrong too often."""
        self._note_withdrawal(self.level)
        self._certified_only()
        self._change("serving" if self.level else "stopped", judged.audits, judged.losses, tightened=True)

    def _note_withdrawal(self, left: int) -> None:
        number = self.withdrawals[-1].number + 1 if self.withdrawals else 1
        fewer = (each for each in self.withdrawals if each.left < left)
        self.withdrawals = (*fewer, Withdrawal(number, left))
        self.certifiable = min(self.certifiable, left)

    def _certified_only(self) -> None:
        """Forget the number of audits of a proof, unless it lets more answer than a certificate does."""
        if self.level <= self._ladder.certified:
            self.proven_on = 0

    def _change(self, state: State, audits: int, losses: int, *, tightened: bool = False) -> None:
        self.state = state
        self.epoch += 1
        if self._on_event is not None:
            self._on_event(Event(state, audits, losses, self.level, tightened))

    def to_json(self) -> dict[str, Any]:
        """State and evidence, as JSON values."""
        ladder = {**self._ladder.to_json(), "certified_level": self._ladder.certified}
        if self.settings == 1:  # the format from before there were several settings
            ladder = {"guard": ladder["guards"][0], "proof": None if self.level else ladder["proofs"][0]}
        counted = {"audits": self.audits, "losses": self.losses, "proven_on": self.proven_on}
        withdrawn = {
            "withdrawn_to": self.withdrawn_to,
            "withdrawals": [list(each) for each in self.withdrawals],
            "certifiable": self.certifiable,
        }
        return {"state": self.state, **counted, **withdrawn, **ladder, **self._left.to_json(self._evidence())}

    @classmethod
    def from_json(
        cls,
        document: Mapping[str, Any],
        *,
        spend: Callable[[], float],
        lasts: Duration = AT_ONCE,
        on_event: OnEvent | None = None,
    ) -> Watch:
        """Restore the state from `to_json`, without spending any delta.

        Raises KeyError, TypeError, ValueError or AdaptError for a document that `to_json` did not write.
        """
        proven_on = int(document.get("proven_on", 0))
        ladder = Ladder.from_json(_with_ladder(document), spend=spend, lasts=lasts)
        ladder.certify(int(document.get("certified_level", 0 if proven_on else ladder.level)))
        state: State = document["state"]
        if state not in get_args(State) or (state == "serving") != (ladder.level > 0):
            raise ValueError(f"state is {state!r}, which does not fit {ladder.level} proven settings")
        watch = cls(ladder.agreement, spend=spend, proven=True, on_event=on_event)
        watch._ladder = ladder
        watch.state = state
        watch.audits, watch.losses = int(document["audits"]), int(document["losses"])
        watch.proven_on = proven_on
        watch.certifiable = int(document.get("certifiable", ladder.certified))
        if not 0 <= watch.certifiable <= len(ladder):
            raise ValueError(f"certifiable is {watch.certifiable}, which does not fit {len(ladder)} settings")
        before = ladder.certified if ladder.certified < len(ladder) else None
        watch.withdrawals = withdrawals_in(document, before)
        watch._left = LeftRequests.from_json(document, len(ladder))
        return watch


def _with_ladder(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The document in ladder format; one of a single setting has one guard, and a proof unless it serves."""
    if "guards" in document:
        return document
    guard, proof = document["guard"], document["proof"]
    proofs = [Proof(float(guard["agreement"]), 0.5).to_json() if proof is None else proof]
    return {"level": int(proof is None), "guards": [guard], "proofs": proofs}
