"""The work that follows an answer of a stream: samples, audits, and lookups by caches on trial.

`gati.guard.auditor` decides what to do. The work runs in a background thread, or inline if time is simulated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from gati.adaptation.background import Failures, Worker
from gati.adaptation.deployments import Deployed
from gati.adaptation.recall import Recall
from gati.adaptation.recall_records import Looked
from gati.adaptation.samples import Sample, Samples
from gati.adaptation.settings import Audit, OnAudit
from gati.adaptation.shadow import Shadow, Ticket
from gati.adaptation.succession import Succession
from gati.engine.exits import Prediction
from gati.guard.auditor import Auditor, Compared, Decided, Probed, lookups_failed
from gati.guard.draws import Draws
from gati.guard.posts import Post
from gati.guard.standing_file import Snapshot

OnSample = Callable[[Sample, Prediction], None]  # the sample, and the answer given


class FollowUp:
    """Decides what to do for a request, and does it in `worker`.

    Caches are looked up and judged on requests that memory does not answer; `recall` learns from all.
    `exact`: the engine's answer at the end of its network is the reference. `lock` is the caller's, so that
    listeners may call it. `auditor` counts audits. `on_sample` gets samples with the reference's answer.
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
        self._on_sample, self._on_audit = on_sample, on_audit
        self._failures = Failures()
        self.auditor = Auditor[Deployed](exact=exact, memory=recall, compare=succession.compare)
        self.late = False  # whether early answers waited for audits when a request was last decided about

    def decide(
        self, more_samples: float, *, lookups_pay: bool, looked: Looked | None = None
    ) -> Decided[Deployed]:
        """Decide about the next request, before its answer is known.

        `more_samples` is the share to sample now. `looked` is its lookup in memory, if there was one.
        """
        self.late = self._worker.late
        with self._lock:
            return self.auditor.decide(
                self._succession.serving,
                self._succession.trial,
                self._draws,
                room=self._worker.reserve,
                more_samples=more_samples,
                lookups_pay=lookups_pay,
                new_scene=looked is not None and looked.new_scene,
                repeated=looked is not None and looked.repeated,
                late=self.late,
            )

    def answered(self, ticket: Ticket, decided: Decided[Deployed], base: Prediction | None) -> bool:
        """Carry out the decision for a request; returns whether the reference answered it.

        `base` is the reference's answer, if the caller knows it.
        """
        known = self.auditor.known(decided, ticket.given)
        if decided.looked_at:
            kept = ticket._replace(x=ticket.x.detach().clone())  # the caller may use its buffer again
            self._worker.submit(lambda: self._look_at(kept, decided, base), reserved=True)
        elif known is not None:
            self.auditor.learn(decided, ticket.given, known)
        return known is not None

    def unanswered(self, ticket: Ticket, decided: Decided[Deployed]) -> None:
        """Carry out what is left of the decision for a request whose engine failed (`Auditor.unanswered`)."""
        if not decided.looked_at:
            return
        with self._lock:
            left = self.auditor.unanswered(decided)
        if left.looked_at:
            self.answered(ticket, left, None)
        else:
            self._worker.release()

    def _look_at(self, ticket: Ticket, decided: Decided[Deployed], base: Prediction | None) -> None:
        needs = self.auditor.needs(decided, ticket.given, base)
        if needs is None:
            return
        try:
            base = needs.known or self._shadow.reference(ticket.x)
        except Exception:
            with self._lock:
                self.auditor.failed(decided, ticket.given, needs.shadows)
                snapshot = self._succession.standing.audited()
            self._write(snapshot)
            raise
        found = [(post, counting, self._looked_up(post, ticket.x, base)) for post, counting in needs.shadows]
        asked = self.auditor.own(decided, ticket.given, base)
        own = [] if asked is None else self._looked_up(asked, ticket.x, base)
        with self._lock:
            compared = self.auditor.settle(decided, ticket.given, base, found, own)
            if decided.drawn.sample and not ticket.given.recalled:
                self._sample(ticket, base)
            snapshot = self._succession.standing.audited()
        self._write(snapshot)
        if self._on_audit is not None:
            for each in compared:
                self._on_audit(_audit(ticket, each))

    def _write(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            self._succession.standing.write(snapshot)

    def _looked_up(self, post: Post[Deployed], x: Tensor, base: Prediction) -> list[Probed]:
        """The answer of each setting of a version; one that fails disagrees, and hides no other answer."""
        try:
            if post.settings:
                return self._shadow.probe(post.version)(x, base)
            engine = self._shadow.caches(post.version.served, threaded=self._worker.threaded)
            said = engine.inline(x)[0]  # only the engine that serves reserves cores
            return [Probed(said.class_index, said.exit, said.class_index == base.class_index)]
        except Exception:
            self._failures.tell(f"lookups of version {post.version.number} failed")
            return lookups_failed(post)

    def _sample(self, ticket: Ticket, base: Prediction) -> None:
        sample = Sample(
            ticket.x[0],
            base.class_index,
            base.probabilities.float(),
            ticket.time_s,
            ticket.request,
            ticket.source,
            place=ticket.place,
        )
        if self._samples.add(sample) and self._on_sample is not None:
            self._on_sample(sample, ticket.given.prediction)


def _audit(ticket: Ticket, found: Compared[Deployed]) -> Audit:
    if found.version is None:
        raise AssertionError("every version of a stream is watched")
    number, classes = found.version.number, (found.class_index, found.base_class)
    return Audit(ticket.request, ticket.time_s, number, *classes, exit=found.exit, shadow=found.shadow)
