"""What follows an answer: the sample and the audit, and the watch that takes audits in."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from gati.adapt import watch
from gati.adapt.background import Worker
from gati.adapt.recall import Recall
from gati.adapt.renewal import Promise
from gati.adapt.samples import Sample, Samples
from gati.adapt.settings import AdaptSettings, Audit, OnAudit
from gati.adapt.shadow import Shadow, Ticket
from gati.adapt.watch import Watch
from gati.runtime.exits import BASE, Prediction

__all__ = ["FollowUp", "OnSample"]

_PATIENCE = 3  # times the audits that perfect caches need to pass

OnSample = Callable[[Sample, Prediction], None]  # the sample, and what was answered


class FollowUp:
    """Draws samples and audits, and does them: at once where that costs nothing, else in `worker`.

    Samples are of requests that reached the network, and so are the audits of its caches; `recall` learns
    from all. `lock` is the caller's: what hears of changes may ask the caller. `on_watch` hears of caches
    that stop or return, `on_sample` of samples with the base model's answer.
    """

    def __init__(
        self,
        settings: AdaptSettings,
        promise: Promise,
        samples: Samples,
        shadow: Shadow,
        worker: Worker,
        lock: threading.RLock,
        *,
        recall: Recall | None,
        on_watch: Callable[[watch.Event], None],
        on_sample: OnSample | None = None,
        on_audit: OnAudit | None = None,
    ) -> None:
        self._settings = settings
        self._samples = samples
        self._shadow = shadow
        self._worker = worker
        self._recall = recall
        self._on_watch, self._on_sample, self._on_audit = on_watch, on_sample, on_audit
        self._random = random.Random(settings.seed)
        self._lock = lock
        self._watch = Watch(
            promise.accuracy,
            confidence=promise.confidence,
            audits_to_false_alarm=settings.audits_to_false_alarm,
            budget=settings.audit_budget,
            seed=settings.seed,
            on_event=self._watched,
        )
        self.epoch = 0  # of the watch: audits drawn in another one say nothing about this
        self.probation = False
        self._tried, self._patience = 0, _PATIENCE * promise.required
        self.audits = self.losses = self.left_out = 0

    @property
    def may_hit(self) -> bool:
        """Whether early answers may be given."""
        return self._watch.may_hit

    @property
    def state(self) -> watch.State:
        """Whether the caches serve."""
        return self._watch.state

    @property
    def on_trial(self) -> bool:
        """Whether caches are on probation and may still pass: three times the audits of perfect ones."""
        return self.probation and self._tried < self._patience

    def draw(self, sampling: float) -> tuple[bool, bool]:
        """Whether the next request is to be audited and sampled, before anything is known of its answer."""
        with self._lock:
            return self._watch.draw(), self._random.random() < sampling

    def replaced(self, *, on_probation: bool = False) -> None:
        """Other caches, or the same again, begin: on probation as asked, or where they were stopped."""
        with self._lock:
            self.epoch += 1
            self._tried = 0
            self._watch.replaced(on_probation=on_probation)
            self.probation = self._watch.state == "stopped"

    def answered(self, ticket: Ticket, *, drawn: bool, may_hit: bool, base: Prediction | None) -> None:
        """Do what was drawn for a request; `base` is the base model's answer where the caller knows it."""
        hit = ticket.prediction.exit != BASE
        with self._lock:
            self._watch.answered(hit=hit, audited=drawn)
            if not hit:
                self._learn(ticket, ticket.prediction, agreed=True)
            if not may_hit and not ticket.recalled:
                self._stopped(ticket)
            elif ticket.audited:
                known = base if hit else ticket.prediction
                if known is not None:
                    self._compared(ticket, known)
                else:
                    self._leave_to_worker(lambda: self._compared(ticket, self._shadow.base(ticket.x)))

    def _learn(self, ticket: Ticket, base: Prediction, *, agreed: bool) -> None:
        if self._recall is not None and ticket.looked is not None:
            self._recall.learn(ticket.looked, base, drawn=ticket.audited, agreed=agreed)

    def _stopped(self, ticket: Ticket) -> None:
        if ticket.sampled:
            self._sample(ticket, ticket.prediction)
        if self.probation and (ticket.audited or self._random.random() < self._settings.probation):
            self._leave_to_worker(lambda: self._look_up(ticket))

    def _leave_to_worker(self, job: Callable[[], None]) -> None:
        self.left_out += not self._worker.submit(job)

    def _look_up(self, ticket: Ticket) -> None:
        """What the caches on probation would have answered where the base model did."""
        looked_up = self._shadow.caches(ticket.current.served, beside=self._worker.beside)(ticket.x)[0]
        tried = ticket._replace(prediction=looked_up, sampled=False, looked=None)
        self._compared(tried, ticket.prediction)

    def _compared(self, ticket: Ticket, base: Prediction) -> None:
        audit = Audit(
            *(ticket.request, ticket.time_s, ticket.current.number),
            *(ticket.prediction.class_index, base.class_index, ticket.prediction.exit),
        )
        with self._lock:
            self.audits += 1
            self.losses += not audit.agreed
            if ticket.prediction.exit != BASE:
                self._learn(ticket, base, agreed=audit.agreed)
            if ticket.sampled and not ticket.recalled:
                self._sample(ticket, base)
            if ticket.epoch == self.epoch and not ticket.recalled:
                self._tried += 1
                self._watch.audited(agreed=audit.agreed)
        if self._on_audit is not None:
            self._on_audit(audit)

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

    def _watched(self, event: watch.Event) -> None:
        self.epoch += 1
        self.probation = False
        self._on_watch(event)
