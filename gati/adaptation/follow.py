"""What follows an answer: samples, audits, and lookups by caches that do not answer yet.

What is done for a request is decided before it is answered, and so is whether there is time to do it. Then
everything goes through one queue, the audits of requests that missed included, although they cost nothing:
what is lost when the process ends is lost whatever it would have shown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from gati.adaptation.background import Worker
from gati.adaptation.deployments import Deployed
from gati.adaptation.probe import Probed
from gati.adaptation.recall import Recall
from gati.adaptation.samples import Sample, Samples
from gati.adaptation.settings import Audit, OnAudit
from gati.adaptation.shadow import Shadow, Ticket
from gati.adaptation.succession import Post, Succession
from gati.engine.exits import BASE, Prediction
from gati.guard.draws import NOTHING, Drawn, Draws
from gati.guard.proof import Proof

__all__ = ["Decided", "FollowUp", "OnSample"]

OnSample = Callable[[Sample, Prediction], None]  # the sample, and what was answered


class Decided(NamedTuple):
    """What was decided about a request before it was answered.

    `may_hit`: the caches of `post` may answer, as `deployed`, its setting of that `level`; `lookups`: they
    are asked. `shadows` are looked up besides, with the epochs of their watches.
    """

    post: Post
    deployed: Deployed
    level: int
    epoch: int
    may_hit: bool
    lookups: bool
    drawn: Drawn
    shadows: tuple[tuple[Post, int], ...]
    tried: bool = False  # it is looked at for a proof of memory

    @property
    def looked_at(self) -> bool:
        """Whether anything is to be done for the request."""
        return self.drawn.audit or self.drawn.sample or bool(self.shadows) or self.tried


class FollowUp:
    """Decides what is done for a request and does it: at once where time is simulated, else in `worker`.

    Caches are asked, and judged, on requests that memory does not answer; `recall` learns from all. `exact`
    says that what the engine answers at the end of its network is the reference. `lock` is the caller's: what
    hears of changes may ask the caller. `on_sample` hears of samples with the reference's answer.
    """

    def __init__(
        self,
        draws: Draws,
        succession: Succession,
        samples: Samples,
        shadow: Shadow,
        worker: Worker,
        lock: threading.RLock,
        *,
        exact: bool,
        recall: Recall | None,
        on_sample: OnSample | None = None,
        on_audit: OnAudit | None = None,
    ) -> None:
        self._draws = draws
        self._succession = succession
        self._samples = samples
        self._shadow = shadow
        self._worker = worker
        self._lock = lock
        self._exact = exact
        self._recall = recall
        self._on_sample, self._on_audit = on_sample, on_audit
        self._proving: Proof | None = None  # memory's proof under way
        self._share = 0.0  # of requests that are looked at for it
        self.audits = self.losses = self.left_out = 0

    def decide(self, more_samples: float, *, lookups_pay: bool) -> Decided:
        """Decide about the next request, before anything is known of its answer.

        `more_samples` is the share to be sampled now. What there is no room for in the queue is left out now,
        whatever the answer will be.
        """
        with self._lock:
            post = self._succession.serving
            may_hit = post.may_hit
            lookups = may_hit and lookups_pay
            drawn = self._draws.draw(more_samples)
            decided = Decided(
                *(post, post.deployed, post.level, post.watch.epoch, may_hit, lookups, drawn),
                self._shadows(drawn, may_hit=may_hit, lookups=lookups),
                tried=drawn.chance < self._trying(more_samples),
            )
            if decided.looked_at and not self._worker.reserve():
                self.left_out += 1
                return decided._replace(drawn=NOTHING, shadows=(), tried=False)
            return decided

    def _shadows(self, drawn: Drawn, *, may_hit: bool, lookups: bool) -> tuple[tuple[Post, int], ...]:
        """Who is looked up beside; oftener where the reference answers anyway and a proof may be near."""
        serving, trial = self._succession.serving, self._succession.trial
        posts = [trial] if may_hit else [serving, trial]
        return tuple(
            (post, post.watch.epoch)
            for post in posts
            if post is not None and (drawn.audit or (drawn.trial and not lookups and not post.hopeless))
        )

    def _trying(self, share: float) -> float:
        """The share of requests that are audits for a proof of memory: the same as long as it takes.

        It is the share sampled when the proof begins: base answers are computed for no more than was allowed.
        """
        proof = None if self._recall is None else self._recall.proving
        if proof is not self._proving:
            self._proving, self._share = proof, 0.0 if proof is None else share
        return self._share

    def withdraw(self, decided: Decided) -> None:
        """Forget what was decided: the request could not be answered."""
        if decided.looked_at:
            self._worker.release()

    def answered(self, ticket: Ticket, decided: Decided, base: Prediction | None) -> None:
        """Do what was decided for a request; `base` is the reference's answer where the caller knows it."""
        exact = self._exact or not decided.may_hit
        own = ticket.prediction if ticket.prediction.exit == BASE and exact else None
        if decided.looked_at:
            known = own or base
            self._worker.submit(lambda: self._look_at(ticket, decided, known), reserved=True)
        elif own is not None:
            self._learn(ticket, own, decided)

    def _learn(self, ticket: Ticket, base: Prediction, decided: Decided) -> None:
        if self._recall is not None and ticket.looked is not None:
            self._recall.learn(ticket.looked, base, drawn=decided.drawn.audit, tried=decided.tried)

    def _look_at(self, ticket: Ticket, decided: Decided, known: Prediction | None) -> None:
        drawn = decided.drawn
        shadows = () if ticket.recalled else decided.shadows
        tries = decided.tried and ticket.looked is not None
        if not (drawn.audit or drawn.sample or shadows or tries):
            return  # drawn for caches, not asked what memory answers, or for memory, which knows no place
        base = known or self._shadow.reference(ticket.x)
        found = [(post, epoch, self._looked_up(post, ticket.x, base)) for post, epoch in shadows]
        own: list[Probed] = []
        if drawn.audit and decided.lookups and decided.post.version.settings and not ticket.recalled:
            own = self._looked_up(decided.post, ticket.x, base)
        audits = []
        with self._lock:
            self._learn(ticket, base, decided)
            if decided.drawn.audit:
                audits.append(self._audited(ticket, decided, base, own))
            left = ticket.prediction.exit if decided.lookups else None
            for post, epoch, probed in found:
                audits.append(self._tried(post, epoch, ticket, base, probed))
                self._succession.compare(post, [each.exit for each in probed], left)
            if decided.drawn.sample and not ticket.recalled:
                self._sample(ticket, base)
            snapshot = self._succession.standing.audited()
        if snapshot is not None:
            self._succession.standing.write(snapshot)
        if self._on_audit is not None:
            for audit in audits:
                self._on_audit(audit)

    def _looked_up(self, post: Post, x: Tensor, base: Prediction) -> list[Probed]:
        """What each setting of a version would answer."""
        if post.version.settings:
            return self._shadow.probe(post.version)(x, base)
        said = self._shadow.caches(post.version.served, beside=self._worker.beside)(x)[0]
        return [Probed(said.class_index, said.exit, said.class_index == base.class_index)]

    def _tried(
        self, post: Post, epoch: int, ticket: Ticket, base: Prediction, probed: Sequence[Probed]
    ) -> Audit:
        """Count what a version would have answered; the audit is of the setting that is to be proven next."""
        watch = post.watch
        said = probed[min(watch.level, len(probed) - 1)]
        if watch.epoch == epoch:
            watch.audited(agreed=[each.agreed for each in probed])
        classes = said.class_index, base.class_index
        return Audit(
            ticket.request, ticket.time_s, post.version.number, *classes, exit=said.exit, shadow=True
        )

    def _audited(self, ticket: Ticket, decided: Decided, base: Prediction, own: Sequence[Probed]) -> Audit:
        """Count what was answered; `own` says what the other settings would have."""
        audit = ticket.compared(decided.deployed.number, base)
        self.audits += 1
        self.losses += not audit.agreed
        asked = decided.lookups or (decided.may_hit and not self._exact)
        if asked and not ticket.recalled and decided.post.watch.epoch == decided.epoch:
            agreed = [each.agreed for each in own] or [audit.agreed]
            agreed[decided.level - 1] = audit.agreed
            decided.post.watch.audited(agreed=agreed)
        return audit

    def _sample(self, ticket: Ticket, base: Prediction) -> None:
        sample = Sample(
            ticket.x[0].clone(),
            base.class_index,
            base.probabilities.float(),
            ticket.time_s,
            ticket.request,
            ticket.source,
        )
        self._samples.add(sample)
        if self._on_sample is not None:
            self._on_sample(sample, ticket.prediction)
