"""Guarding one composition while it serves: who is audited, when its caches stop, when they may return."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gati.adapt.guard import Guard
from gati.adapt.recertify import Recertification
from gati.errors import AdaptError

__all__ = ["AuditSampler", "Event", "State", "Watch"]

State = Literal["serving", "stopped"]

_MEMORY = 0.999  # of the running hit rate
_CAUTIOUS_HIT_RATE = 1.0  # to begin with: no budget is spent before the hit rate is known


class AuditSampler:
    """Draws the requests to be audited, all requests alike, before anything is known of their answers.

    The audit of a request that missed costs nothing: the base model has answered it. That of a hit costs one
    run of the base model; these are kept to `budget` of what the base model would take for all requests, by
    the rate and, should the hit rate rise suddenly, by a limit.
    """

    def __init__(self, budget: float = 0.05, *, seed: int | None = None) -> None:
        if not 0.0 < budget <= 1.0:
            raise AdaptError(
                f"the audit budget is {budget!r}, must be above 0 and at most 1, for example 0.05"
            )
        self.budget = budget
        self.requests = 0
        self.paid = 0
        self._hit_rate = _CAUTIOUS_HIT_RATE
        self._random = random.Random(seed)

    @property
    def rate(self) -> float:
        """The share of requests that is drawn now."""
        return min(1.0, self.budget / max(self._hit_rate, self.budget))

    def draw(self) -> bool:
        """Whether to audit the next request; ask once a request, before it is answered."""
        self.requests += 1
        within = self.paid + 1 <= self.budget * self.requests
        return self._random.random() < self.rate and within

    def answered(self, *, hit: bool, audited: bool) -> None:
        """Tell what became of the request."""
        self._hit_rate = _MEMORY * self._hit_rate + (1.0 - _MEMORY) * hit
        self.paid += hit and audited


@dataclass(frozen=True)
class Event:
    """A change of state, for logs, metrics and pages."""

    state: State
    request: int
    audits: int
    losses: int


class Watch:
    """Decides, request by request, whether the caches may answer.

    Ask `may_hit` and `draw` before a request, tell `answered` after it, and `audited` once the base model's
    class is known. In alarm the caches stop at once; `replaced` says that others took their place, which
    return when agreement is proven on audits made since. While stopped, lookups are made in the shadow of the
    base model for the requests drawn: `hit` then means that the cache would have answered.
    """

    def __init__(
        self,
        agreement: float,
        *,
        confidence: float = 0.95,
        audits_to_false_alarm: float = 10_000.0,
        budget: float = 0.05,
        seed: int | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._guard = Guard(agreement, audits_to_false_alarm)
        self._agreement = agreement
        self._confidence = confidence
        self._proof: Recertification | None = None
        self._on_event = on_event
        self.sampler = AuditSampler(budget, seed=seed)
        self.state: State = "serving"

    @property
    def may_hit(self) -> bool:
        """Whether early answers may be given."""
        return self.state == "serving"

    def draw(self) -> bool:
        """Whether the next request is to be audited."""
        return self.sampler.draw()

    def answered(self, *, hit: bool, audited: bool) -> None:
        """Tell what became of a request; while stopped nothing is paid, for the base model answers anyway."""
        self.sampler.answered(hit=hit and self.may_hit, audited=audited)

    def audited(self, *, agreed: bool) -> None:
        """Take in an audit. A request that missed has agreed."""
        if self.state == "serving":
            if self._guard.audit(agreed=agreed):
                self._change("stopped", self._guard.audits, self._guard.losses)
        elif self._proof is not None and self._proof.audit(agreed=agreed):
            audits, losses = self._proof.audits, self._proof.losses
            self._proof = None
            self._guard.reset()
            self._change("serving", audits, losses)

    def replaced(self, *, on_probation: bool = False) -> None:
        """Other caches begin. `on_probation`, or where the old were stopped, they prove themselves first.

        The proof is on audits made from now on.
        """
        if on_probation:
            self.state = "stopped"
        if self.state == "serving":
            self._guard.reset()
        else:
            self._proof = Recertification(self._agreement, self._confidence)

    def _change(self, state: State, audits: int, losses: int) -> None:
        self.state = state
        if self._on_event is not None:
            self._on_event(Event(state, self.sampler.requests, audits, losses))
