"""Adapts the caches of one model to the samples in its record store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gati.adaptation.deployments import Deployed, Deployments
from gati.adaptation.renewal import Renewal, RenewalOutcome, promise_of
from gati.adaptation.samples import Samples, restored
from gati.composition.load import Served, open_served
from gati.errors import GatiError, first_line
from gati.samples.record import Record
from gati.samples.store import RecordStore
from gati.versions.repository import ModelRepository
from services.adaptation.reasons import Latest, Rules
from services.adaptation.settings import AdaptationSettings, AdaptedModel
from services.scratch import Scratch
from services.wire.gen.ttypes import AdaptationStatus

_log = logging.getLogger("gati.adaptation")


class ModelAdaptation:
    """One model. Call `look` from one thread at a time; `status` is thread-safe.

    `now` gives seconds since 1970, as in samples; `clock` measures intervals.
    """

    def __init__(
        self,
        model: AdaptedModel,
        settings: AdaptationSettings,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._now, self._clock = now, clock
        self._settings = settings.of_each_model()
        self._served = open_served(model.library, composition=model.composition, threads=settings.threads)
        self._store = RecordStore.open(model.records, max_age_s=settings.window_s, connect=False)
        self._scratch = Scratch("adaptation")
        self._repository = ModelRepository(model.repository)
        self._deployments = Deployments(self._served, self._repository, model.name, self._scratch.path)
        promise = promise_of(self._served, self._settings)
        self._renewal = Renewal(
            self._deployments, self._served, self._settings, promise, clock=time.thread_time
        )
        self._token = self._repository.active_token(model.name)
        active, why_not = self._deployments.active()
        self._serving: Deployed = active  # the version that answered, according to the samples
        self._looked = False
        self._published: Deployed = active
        self._unproven: set[int] = set()  # versions that never came to answer, and are not tried again
        if why_not:
            _log.warning(why_not, extra={"model": model.name})
        self._rules = Rules(
            promise.accuracy,
            settings.interval_s,
            self._settings.falls_to,
            self._renewal.least_inputs,
            settings.window_inputs,
        )
        self._latest = self._latest_of(active)
        self._tried_s = clock()
        self._interval_s = settings.interval_s
        self._began_s: float | None = None  # when the last retraining began
        self._changed_s: float | None = None  # when the last attempt ended
        self._outcome, self._message = "", ""
        self._samples = 0
        self._hit_rate = active.promised
        self._retraining = False
        if (unfinished := self._deployments.unfinished()) is not None:
            _log.info(
                "activates the version of a process that was killed",
                extra={"model": model.name, "version": unfinished.number},
            )
            self._publish(unfinished)

    @property
    def name(self) -> str:
        """The name of the model."""
        return self._model.name

    def status(self) -> Any:
        """The wire's `AdaptationStatus`."""
        return AdaptationStatus(
            model=self.name,
            version=self._published.number,
            samples=self._samples,
            retraining=self._retraining,
            outcome=self._outcome,
            message=self._message,
            hit_rate=self._hit_rate,
            promised_hit_rate=self._published.promised,
            next_s=None if self._retraining else self._next_s(),
            changed_s=self._changed_s,
            began_s=self._began_s,
        )

    def look(self, *, asked: bool = False) -> None:
        """Renew the caches at intervals, when the samples show that it is needed, or if `asked`."""
        self._follow()
        outcomes = self._store.outcomes(self.name, self._settings.window_inputs)
        self._samples = len(outcomes)
        now_s = self._now()
        self._latest.since_s = min(self._latest.since_s, now_s)  # the clock may have been set back
        if self._began_s is not None:
            self._began_s = min(self._began_s, now_s)
        tried_s = now_s - (self._clock() - self._tried_s)
        due = self._rules.due(outcomes, self._latest, tried_s, now_s, self._began_s)
        self._hit_rate = due.hit_rate
        if outcomes and not self._looked:
            self._serving, self._looked = self._answered(outcomes[-1].source), True
        if self._latest.seen:
            self._serving = self._published
            self._unproven.discard(self._published.number)
        if due.skipped and not asked:
            self._tried_s = self._clock()
            self._ended("skipped", due.skipped)
        reason = "interval" if asked else due.reason
        if reason is None:
            return
        if not asked and not self._latest.seen:  # in all the time that the rules gave it
            self._unproven.add(self._published.number)
        self._began_s, self._retraining = self._now(), True
        try:
            records = self._store.window(self.name, limit=self._settings.window_inputs)
            self._renew(restored(_as_inputs(records, self._served), self._served, self._settings), reason)
        except GatiError as error:
            self._ended("failed", str(error))
        except Exception as error:  # of any type, like the failures of training: the next attempt follows
            _log.exception("retraining failed", extra={"model": self.name})
            self._ended("failed", first_line(error))
        finally:
            self._retraining = False
            self._tried_s = self._clock()

    def close(self) -> None:
        """Remove local files."""
        self._store.close()
        self._scratch.close()

    # ----------------------------------------------------------------------------------------------------

    def _next_s(self) -> float:
        """Seconds until the next attempt; a version that does not answer yet has more time to be proven."""
        left_s = self._tried_s + self._interval_s - self._clock()
        if left_s <= 0.0 and not self._latest.seen:
            left_s = self._rules.proven_by_s(self._latest) - self._now()
        return max(0.0, left_s)

    def _follow(self) -> None:
        """Go on from the version that an operator has activated or rolled back to, if one has."""
        token = self._repository.active_token(self.name)
        if token == self._token:
            return
        active, why_not = self._deployments.active()
        self._token = token
        if why_not:
            _log.warning(why_not, extra={"model": self.name})
        elif active.number != self._published.number:
            _log.info("another version was activated", extra={"model": self.name, "version": active.number})
            self._goes_on_from(active)

    def _renew(self, samples: Samples, reason: str) -> None:
        _log.info("looking for better caches", extra={"model": self.name, "reason": reason})
        outcome: RenewalOutcome | None = self._renewal(
            self._serving, samples, reason, unproven=self._unproven
        )
        if outcome is None:
            self._ended("skipped", self._rules.too_few(len(samples)))
            return
        if outcome.kind == "kept":
            self._ended(outcome.kind, outcome.message)
            return
        self._publish(outcome.deployed)
        self._ended(
            outcome.kind, f"{outcome.message}; it will answer after the inference service has proven it"
        )

    def _answered(self, source: str) -> Deployed:
        """The version of that name in samples: what is active may wait for its proof, or have failed it."""
        if source == self._model.composition:
            return self._deployments.open(0)
        if source.isdecimal():
            with suppress(GatiError):  # it was removed meanwhile, or made for another composition
                return self._deployments.open(int(source))
        return self._published

    def _publish(self, deployed: Deployed) -> None:
        """Activate a version in the repository, from which the inference service loads it."""
        if self._repository.active(self.name) != deployed.number:
            self._deployments.activate(deployed)
        self._goes_on_from(deployed)

    def _goes_on_from(self, deployed: Deployed) -> None:
        self._published = deployed
        self._latest = self._latest_of(deployed)
        self._hit_rate = deployed.promised

    def _latest_of(self, deployed: Deployed) -> Latest:
        """Return a version's name in samples: its number, or the name of the library's composition."""
        name = str(deployed.number) if deployed.number else self._model.composition
        return Latest(name, deployed.promised, self._now())

    def _ended(self, outcome: str, message: str) -> None:
        self._outcome, self._message = outcome, message
        self._changed_s = self._now()
        level = logging.WARNING if outcome == "failed" else logging.INFO
        extra = {"model": self.name, "outcome": outcome, "reason": message, "version": self._published.number}
        _log.log(level, "renewal ended", extra=extra)


def _as_inputs(records: Sequence[Record], served: Served) -> list[Record]:
    """Preprocess images for the network; return other inputs unchanged."""
    found = []
    for record in records:
        if record.kind == "image":
            x = served.model.preprocessing(record.input[None])[0]
            record = replace(record, input=x.numpy(), kind="input")
        found.append(record)
    return found
