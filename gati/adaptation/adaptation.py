"""One model that answers requests and adapts its caches to them.

    with Adaptation.open("runs/mine", settings=AdaptSettings(interval_s=600)) as adaptation:
        answered = adaptation.answer(x, time_s=time.time(), source="camera:0")

Every request is answered by one version. Two background threads compute reference answers for samples and
audits, look up caches on probation, and retrain; with `deterministic` all of it happens inline at the same
point of stream time, so that a recorded stream gives the same answers every time.

Only proven caches answer early: proven by the certificate of `gati compose`, or by audits of later requests
(`gati.guard.watch`). Until then, retrained and earlier versions run in the background, in the shadow of the
serving one.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from gati.adaptation.answering import AnsweringEngines
from gati.adaptation.attempts import Attempts
from gati.adaptation.background import in_background, in_line
from gati.adaptation.counts import RequestCounts
from gati.adaptation.deployments import Deployed, Deployments
from gati.adaptation.follow import FollowUp
from gati.adaptation.recall import Recall
from gati.adaptation.recall_file import MemoryKeeper, memory_file, memory_identity, network_identity
from gati.adaptation.recall_settings import MOST
from gati.adaptation.references import open_networks, reference_of
from gati.adaptation.renewal import Renewal, candidate_blocks, promise_of
from gati.adaptation.rest import Rest
from gati.adaptation.samples import Sample, recorded, restored
from gati.adaptation.settings import (
    AdaptSettings,
    Answered,
    Change,
    ChangeKind,
    OnAudit,
    OnChange,
    Status,
    model_name,
)
from gati.adaptation.shadow import Shadow, Ticket
from gati.adaptation.succession import Succession
from gati.adaptation.triggers import Triggers
from gati.composition.load import Served, open_served
from gati.engine.exits import BASE, Prediction
from gati.errors import first_line
from gati.guard.auditor import NO_ANSWER, RECALL
from gati.guard.draws import Draws
from gati.guard.ladder import Judgement
from gati.guard.proof import Duration
from gati.guard.standing import Standing, is_reference
from gati.priority import RunningRequests
from gati.samples.record import Record
from gati.samples.writer import BackgroundWriter
from gati.versions.repository import ModelRepository

WINDOW_INPUTS = 700
_TOLD_LATE_EVERY_S = 60.0
_FAREWELL_S = 600.0  # a retraining cannot be interrupted, nor a thread inside an engine abandoned


class Adaptation:
    """Serves `served` and its successors. Call `answer` from one thread at a time; the rest is thread-safe.

    Across restarts, `repository` keeps the versions of `model`, the file `standing` keeps their proofs, and
    `writer` stores the samples, which `history` restores (`time_s` of samples and requests must then be
    seconds since 1970). Proofs count for the same `origin` of requests. Temporary files go to
    `folder`. `clock` times answers, in seconds.
    """

    def __init__(
        self,
        served: Served,
        settings: AdaptSettings | None = None,
        *,
        model: str = "model",
        repository: ModelRepository | None = None,
        standing: Path | None = None,
        folder: Path | None = None,
        origin: str = "",
        writer: BackgroundWriter | None = None,
        history: Sequence[Record] = (),
        on_change: OnChange | None = None,
        on_audit: OnAudit | None = None,
        deterministic: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        asked = settings or AdaptSettings()
        self._promise = promise_of(served, asked)
        self.settings = replace(asked, window_inputs=asked.window_inputs or WINDOW_INPUTS)
        blocks = candidate_blocks(served, self.settings)
        self._model, self._writer, self._on_change, self._clock = model, writer, on_change, clock
        self._lock, self._answering = threading.RLock(), RunningRequests()
        self._counts, self._rest = RequestCounts(), Rest()
        self._tell_late_at_s = -math.inf
        self._networks = open_networks(served, timed=not deterministic)
        self._answer = AnsweringEngines(self._networks.base, self._networks.reference)
        self._folder = Path(tempfile.mkdtemp(prefix="gati-adapt-", dir=folder))
        store = repository or ModelRepository(self._folder / "repository")
        self._deployments = Deployments(served, store, model, self._folder / "versions", blocks)
        timer = (lambda: 0.0) if deterministic else time.thread_time  # the time of training must not matter
        self._renewal = Renewal(self._deployments, served, self.settings, self._promise, clock=timer)
        self._samples = restored(history, served, self.settings)
        self._triggers = Triggers(self.settings, self._renewal.least_inputs)
        self._workers = in_line() if deterministic else in_background(self._answering, self._broken)
        standings = self._open_standing(standing, origin)
        self._succession = Succession(
            *(self._deployments, self._promise, standings, self._lock),
            tell=self._tell,
            on_serving=self._serves,
            leave=self._workers.training.submit,
            figures=self._renewal.figures,
        )
        network, delta = network_identity(served.model), standings.spending.delta
        identity = memory_identity(network, self._promise.accuracy, delta)
        self._keeper = MemoryKeeper(standings, memory_file(standing), identity)
        self._recall = self._open_memory() if self.settings.enabled and self.settings.recall else None
        self._follow = FollowUp(
            self._open_draws(seed=self.settings.seed if deterministic else None),
            self._succession,
            self._samples,
            Shadow(self._networks.reference if deterministic else reference_of(served)),
            self._workers.auditing,
            self._lock,
            exact=self._networks.exact,
            recall=self._recall,
            on_sample=None if writer is None else self._write,
            on_audit=on_audit,
        )
        self._attempts = Attempts(
            *(self._renewal, self._deployments, self._succession, self._samples, self._triggers),
            *(self.settings, self._lock),
            delay_s=self.settings.delay_s if deterministic else None,
            tell=self._tell,
        )
        self._attempts.fitted = self._succession.begin(len(self._samples))

    def _open_standing(self, path: Path | None, origin: str) -> Standing:
        """The watches of all versions, whose proofs take their time on the clock of requests."""
        return Standing(
            1.0 - self._promise.confidence,
            path,
            audits_to_false_alarm=self.settings.audits_to_false_alarm,
            lasts=Duration(self.settings.proof_s, lambda: self._counts.now_s),
            origin=origin,
        )

    def _open_memory(self) -> Recall:
        """The memory of an earlier run, or an empty one; its proofs share the delta of all."""
        recall = Recall(
            self._promise.accuracy,
            self._succession.standing.spending.next,
            self.settings.audits_to_false_alarm,
            leave=self._workers.auditing.submit,
            on_change=self._recalling,
            alone=self.settings.rest and self._networks.exact,
            places=self.settings.places,
            known=self._keeper.known(),
        )
        self._keeper.watch(recall)
        return recall

    def _open_draws(self, *, seed: int | None) -> Draws:
        """Draws within the budget; nothing is sampled if samples are neither learned from nor stored."""
        sampled = self.settings.enabled or self._writer is not None
        return Draws(
            self.settings.audit_budget / self._networks.cost,
            self.settings.sampling if sampled else 0.0,
            self.settings.probation,
            seed=seed,
        )

    @classmethod
    def open(
        cls,
        directory: str | Path,
        settings: AdaptSettings | None = None,
        *,
        composition: str = "default",
        threads: int | None = None,
        **options: Any,
    ) -> Self:
        """Adapt a composition of a cache library; `options` are the constructor's.

        Raises as `gati.load` does, and AdaptError.
        """
        served = open_served(directory, composition=composition, threads=threads)
        return cls(served, settings, **{"model": model_name(directory), **options})

    @property
    def served(self) -> Served:
        """The network and caches that serve now."""
        return self._succession.serving.deployed.served

    @property
    def status(self) -> Status:
        """The current counts."""
        with self._lock:
            counts, audited, serving = self._counts, self._follow.auditor, self._succession.serving
            return Status(
                version=serving.deployed.number,
                state=serving.watch.state,
                requests=counts.requests,
                hits=counts.hits,
                recalled=counts.recalled,
                hit_rate=counts.recent_hit_rate,
                audits=audited.audits,
                losses=audited.losses,
                left_out=audited.left_out,
                samples=len(self._samples),
                retraining=self._attempts.under_way,
                proof=self._succession.how_far,
                promise=self._promise.accuracy if self._may_answer_early else None,
                on_trial=self._succession.on_trial,
                resting=self._waiting
                or (self._has_caches and self._succession.may_hit and not self._rest.lookups_pay),
            )

    @property
    def _has_caches(self) -> bool:
        """Whether the version that serves looks anything up."""
        return bool(self.served.composition.exits)

    @property
    def _may_answer_early(self) -> bool:
        """Whether another answer than the reference's may be given: by caches, memory, reduced precision."""
        if self._recall is not None and self._recall.serves:
            return True
        return self._succession.may_hit and not is_reference(self.served.composition)

    @property
    def _waiting(self) -> bool:
        """Whether early answers pause until their audits have caught up."""
        return self._follow.late and self._may_answer_early

    def base_ms(self, x: Tensor) -> float:
        """How long the base model takes to answer an input [1, ...], on the same backend and all cores."""
        with self._answering, self._answer.released():
            began = self._clock()
            self._networks.base.base(x)
            return 1e3 * (self._clock() - began)

    def answer(
        self,
        x: Tensor,
        *,
        time_s: float,
        source: str = "",
        place: str | None = None,
        base: Prediction | None = None,
    ) -> Answered:
        """Answer an input [1, ...] that arrived at `time_s`, which never decreases.

        `place` names what the input shows, if that is one thing over time: a camera, or a region of its
        pictures. `base` is the reference's answer, if the caller knows it; it saves computing it for samples
        and audits, and is never returned. Raises DataError for an input of another shape.
        """
        self._answer.check(x)
        began, self._counts.now_s = self._clock(), time_s
        looked = None if self._recall is None else self._recall.look(x, place)
        decided = self._follow.decide(self._sampling(), lookups_pay=self._rest.lookups_pay, looked=looked)
        if self._waiting:
            self._waits()
        current = decided.deployed
        ticket = Ticket(x, self._counts.requests + 1, time_s, source, NO_ANSWER, looked, place)
        try:
            prediction = looked.where(alone=decided.alone).answer if looked and decided.recalls else None
            with self._answering:
                prediction = prediction or self._answer(x, decided)
        except BaseException:
            self._follow.unanswered(ticket, decided)
            raise
        prediction = prediction._replace(version=current.served.engine.version)
        latency_ms = 1e3 * (self._clock() - began)
        hit = prediction.exit != BASE
        with self._lock:
            self._counts.answered(prediction.exit, time_s, late=self._follow.late)
            if prediction.exit != RECALL and decided.may_hit:
                self._reached(prediction, lookups=decided.lookups, time_s=time_s)
        agreed = self._follow.answered(ticket._replace(prediction=prediction), decided, base) or None
        self._after(time_s)
        if self._keeper.is_due():
            self._workers.auditing.submit(self._keeper.save)
        drawn = decided.drawn
        return Answered(prediction, hit, drawn.audit, drawn.sample, latency_ms, current.number, agreed)

    def wait(self, deadline_s: float = 60.0) -> bool:
        """Wait for background work, at most `deadline_s` seconds per thread; returns whether all is done."""
        return self._workers.wait(deadline_s)

    def close(self) -> None:
        """Stop the background work and remove local files; stored versions and samples are kept.

        Waits for a running retraining; the next run starts with what it published. Call it from the thread
        that answers.
        """
        self._answer.close()
        self._workers.auditing.close(_FAREWELL_S)
        self._keeper.save()  # now: whoever takes too long to end is killed, perhaps within a retraining
        self._succession.save()
        self._workers.training.close(_FAREWELL_S)
        self._succession.save()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reached(self, prediction: Prediction, *, lookups: bool, time_s: float) -> None:
        """Count a request that the network answered while its caches may answer."""
        if lookups:
            self._triggers.answered(self._counts.requests, hit=prediction.exit != BASE, time_s=time_s)
        instead = 0.0
        if self._recall is not None:
            instead = self._recall.more_alone(after_memory=self._succession.after_memory)
        if self.settings.rest and self._rest.answered(prediction.exit, instead) and self._has_caches:
            why = "memory answers more without them" if instead else "they cost more than they save"
            self._tell("resting", f"lookups pause for a while: {why}")

    def _waits(self) -> None:
        """Tell that early answers wait for audits, once a minute at most."""
        now_s = self._counts.now_s
        if now_s >= self._tell_late_at_s:
            self._tell_late_at_s = now_s + _TOLD_LATE_EVERY_S
            self._tell("resting", "early answers pause until their audits have caught up")

    def _sampling(self) -> float:
        """The share of requests to sample now: more if few hit and samples are needed, at no extra cost."""
        share, hit_rate = self.settings.sampling, self._counts.recent_hit_rate
        fits = self._attempts.fitted and self._triggers.changed_at is None and self._rest.lookups_pay
        if not self.settings.enabled or hit_rate is None or (fits and self._succession.may_hit):
            return share
        return min(1.0, share / max(hit_rate, share))

    def _after(self, time_s: float) -> None:
        """Runs between two requests: let versions take over, or begin to look for a better one."""
        with self._lock:
            self._attempts.take_due(time_s)
            if self._recall is not None:
                self._succession.follow_memory(*self._recall.next_to_caches)
            self._succession.give_up()
            attempt = self._attempts.next(time_s)
        if attempt is not None:
            self._workers.training.submit(attempt)

    def _serves(self, deployed: Deployed) -> None:
        """Reset the counters for the version that serves from now on."""
        self._triggers.replaced(deployed.promised)
        self._rest.replaced(self._renewal.figures(deployed))

    def _recalling(self, judged: Judgement, level: int, alone: bool) -> None:
        where = "where no lookups are made" if alone else "next to caches"
        counted = f"{judged.losses} of {judged.audits} audits disagree"
        self._succession.standing.save()
        self._workers.auditing.submit(self._keeper.save)
        if judged.kind == "released":
            self._tell("recalling", f"memory answers by setting {level} of {len(MOST)} {where}: {counted}")
        elif level:
            self._tell("tightened", f"memory answers less {where}: {counted}", {"of": RECALL})
        else:
            self._tell("alarm", f"memory stops answering {where}: {counted}", {"of": RECALL})

    def _write(self, sample: Sample, answered: Prediction) -> None:
        if self._writer is not None:
            self._writer.offer(recorded(sample, answered, self._model))

    def _broken(self, error: Exception) -> None:  # of any type, and with a message of any length
        self._attempts.failed(first_line(error))

    def _tell(self, kind: ChangeKind, message: str = "", details: dict[str, Any] | None = None) -> None:
        if self._on_change is not None:
            counts, version = self._counts, self._succession.serving.deployed.number
            self._on_change(Change(kind, counts.now_s, counts.requests, version, message, details or {}))
