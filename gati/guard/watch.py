"""Guarding one version while it serves, and proving it before it does: one watch a version.

A version is `serving`, or on `probation` because nothing was proven of it yet, or `stopped` by the guard.
Serving, each audit is one for the guard; in alarm the caches stop at once. Otherwise each audit says what the
caches would have answered, and counts for a proof (`gati.guard.proof`); when that is complete, they serve.

Evidence is never thrown away to try again for free: a proof goes on over everything that happens to other
versions, and over restarts (`to_json`, `from_json`). A new one begins when caches that were proven are
stopped, and where the old one came to nothing or the scene is another; each takes a further share of delta,
so that all proofs together err no oftener than one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gati.guard.detector import Guard
from gati.guard.proof import Proof

__all__ = ["Event", "OnEvent", "State", "Watch"]

State = Literal["serving", "probation", "stopped"]


@dataclass(frozen=True)
class Event:
    """A change of state, and of how many audits how many were losses, for logs, metrics and pages."""

    state: State
    audits: int
    losses: int


OnEvent = Callable[[Event], None]


class Watch:
    """Decides, audit by audit, whether the caches of one version may answer.

    `proven` caches serve at once: a certificate covers the promise. Others are on probation. `spend` hands
    out the delta of each proof, such as `Spending.next`. `on_event` hears of changes. Not thread-safe.

    Ask `may_hit` before a request and tell `audited` once the reference's class is known, for requests that
    were drawn before anything was known of them. `epoch` counts the changes of state: an audit that was drawn
    in another epoch says nothing about this one.
    """

    def __init__(
        self,
        agreement: float,
        *,
        spend: Callable[[], float],
        proven: bool,
        audits_to_false_alarm: float = 10_000.0,
        on_event: OnEvent | None = None,
    ) -> None:
        self._guard = Guard(agreement, audits_to_false_alarm)
        self._spend = spend
        self._on_event = on_event
        self._proof = None if proven else Proof(agreement, spend())
        self.state: State = "serving" if proven else "probation"
        self.epoch = 0
        self.audits = self.losses = 0  # while serving, since the version began
        self.proven_on = 0  # audits of the last proof; 0 where a certificate, or nothing, lets it serve

    @property
    def agreement(self) -> float:
        """What is promised."""
        return self._guard.agreement

    @property
    def may_hit(self) -> bool:
        """Whether early answers may be given."""
        return self.state == "serving"

    @property
    def proof(self) -> Proof | None:
        """The proof under way; None while serving."""
        return self._proof

    def audited(self, *, agreed: bool) -> None:
        """Take in an audit of this epoch: of an answer while serving, else of what the caches would answer.

        A request that misses agrees, unless the network itself answers otherwise than the reference.
        """
        if self._proof is None:
            self.audits += 1
            self.losses += not agreed
            if self._guard.audit(agreed=agreed):
                self._proof = Proof(self.agreement, self._spend())
                self._change("stopped", self._guard.audits, self._guard.losses)
        elif not self._proof.audit(agreed=agreed):
            if self.state == "stopped" and self._proof.hopeless:
                self.prove_anew()
        else:
            audits, losses = self._proof.audits, self._proof.losses
            self._proof = None
            self._guard.reset()
            self.proven_on = audits
            self._change("serving", audits, losses)

    def prove_anew(self) -> None:
        """Begin another proof, on a further share of delta, unless the one under way is better than none.

        Caches that serve do not any more: what was proven of them was proven of other requests.
        """
        if self._proof is not None and self._proof.log_evidence >= 0.0:
            return
        self._proof = Proof(self.agreement, self._spend())
        self.state = "probation" if self.state == "serving" else self.state
        self._guard.reset()
        self.epoch += 1

    def _change(self, state: State, audits: int, losses: int) -> None:
        self.state = state
        self.epoch += 1
        if self._on_event is not None:
            self._on_event(Event(state, audits, losses))

    def to_json(self) -> dict[str, Any]:
        """State and evidence, as JSON values."""
        return {
            "state": self.state,
            "audits": self.audits,
            "losses": self.losses,
            "proven_on": self.proven_on,
            "guard": self._guard.to_json(),
            "proof": None if self._proof is None else self._proof.to_json(),
        }

    @classmethod
    def from_json(
        cls, document: Mapping[str, Any], *, spend: Callable[[], float], on_event: OnEvent | None = None
    ) -> Watch:
        """Go on where `to_json` was called, without spending anything.

        Raises KeyError, TypeError, ValueError or AdaptError for what `to_json` did not write.
        """
        guard = Guard.from_json(document["guard"])
        watch = cls(
            guard.agreement,
            spend=spend,
            proven=True,
            audits_to_false_alarm=guard.audits_to_false_alarm,
            on_event=on_event,
        )
        watch._guard = guard
        watch._proof = None if document["proof"] is None else Proof.from_json(document["proof"])
        state: State = document["state"]
        if state not in get_args(State) or (state == "serving") != (watch._proof is None):
            raise ValueError(f"state is {state!r}, which does not fit the proof")
        if guard.alarmed and state == "serving":
            raise ValueError("the guard is in alarm, but the caches serve")
        watch.state = state
        watch.audits, watch.losses = int(document["audits"]), int(document["losses"])
        watch.proven_on = int(document.get("proven_on", 0))
        return watch
