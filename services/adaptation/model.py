"""Keeping the caches of one model fitting, from what its record store holds."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gati.adapt.deployments import Deployed, Deployments
from gati.adapt.record import Record
from gati.adapt.renewal import Outcome, Renewal, promise_of
from gati.adapt.repository import ModelRepository
from gati.adapt.samples import Samples, restored
from gati.adapt.settings import AdaptSettings
from gati.adapt.store import RecordStore
from gati.compose.certificate import p_value
from gati.errors import GatiError
from gati.runtime.load import Served, open_served
from services.adaptation.settings import AdaptationSettings, AdaptedModel
from services.wire.gen.ttypes import AdaptationStatus

__all__ = ["ModelAdaptation"]

_log = logging.getLogger("gati.adaptation")

_SETTLED = 200  # samples after which their hit rate says something
_SURE = 0.001  # chance of as many disagreements where the promise is kept


class ModelAdaptation:
    """One model. One thread at a time calls `look`; `status` is for any."""

    def __init__(self, model: AdaptedModel, settings: AdaptationSettings) -> None:
        self._model = model
        self._settings = AdaptSettings(
            interval_s=settings.interval_s,
            window_s=settings.window_s,
            window_inputs=settings.window_inputs,
        )
        self._served = open_served(model.library, composition=model.composition)
        self._store = RecordStore.open(model.records, max_age_s=settings.window_s)
        self._folder = Path(tempfile.mkdtemp(prefix="gati-adaptation-"))
        self._deployments = Deployments(
            self._served, ModelRepository(model.repository), model.name, self._folder
        )
        promise = promise_of(self._served, self._settings)
        self._accuracy = promise.accuracy
        self._renewal = Renewal(
            self._deployments, self._served, self._settings, promise, clock=time.perf_counter
        )
        active, why_not = self._deployments.active()
        self._current: Deployed = active
        if why_not:
            _log.warning("the active version cannot serve", extra={"model": model.name, "reason": why_not})
        self._since_s = time.time()  # when the version began, as far as is known here
        self._tried_s = time.time()
        self._outcome, self._message = "", ""
        self._samples = 0
        self._hit_rate = self._current.promised
        self._retraining = False

    @property
    def name(self) -> str:
        """Of the model."""
        return self._model.name

    def status(self) -> Any:
        """The wire's `AdaptationStatus`."""
        return AdaptationStatus(
            model=self.name,
            version=self._current.number,
            samples=self._samples,
            retraining=self._retraining,
            outcome=self._outcome,
            message=self._message,
            hit_rate=self._hit_rate,
            promised_hit_rate=self._current.promised,
        )

    def look(self, *, asked: bool = False) -> None:
        """Renew the caches where it is time, where samples say so, or where somebody asks."""
        records = self._store.window(self.name, limit=self._settings.window_inputs)
        self._samples = len(records)
        reason = "interval" if asked else self._reason(records)
        if reason is None:
            return
        self._retraining = True
        try:
            self._renew(restored(_as_inputs(records, self._served), self._served, self._settings), reason)
        except GatiError as error:
            self._ended("failed", str(error))
        finally:
            self._retraining = False
            self._tried_s = time.time()

    def close(self) -> None:
        """Remove local files."""
        self._store.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ----------------------------------------------------------------------------------------------------

    def _reason(self, records: Sequence[Record]) -> str | None:
        """`alarm`, `hit rate` or `interval`: as the samples since the version began have it."""
        fresh = [record for record in records if record.time_s >= self._since_s]
        early = [record for record in fresh if record.exit is not None]
        if fresh:
            self._hit_rate = len(early) / len(fresh)
        waited = time.time() - self._tried_s >= min(self._settings.interval_s, 60.0)
        wrong = sum(record.agreed is False for record in early)
        if wrong and waited and p_value(len(fresh) - wrong, len(fresh), 1.0 - self._accuracy) <= _SURE:
            return "alarm"
        low = self._hit_rate < self._settings.falls_to * self._current.promised
        if low and waited and len(fresh) >= _SETTLED:
            return "hit rate"
        if len(records) < self._renewal.least_inputs:
            return None
        return "interval" if time.time() - self._tried_s >= self._settings.interval_s else None

    def _renew(self, samples: Samples, reason: str) -> None:
        _log.info("looking for better caches", extra={"model": self.name, "reason": reason})
        outcome: Outcome | None = self._renewal(self._current, samples, reason)
        if outcome is None:
            least = self._renewal.least_inputs
            self._ended("skipped", f"{len(samples)} samples, {least} are needed")
            return
        if outcome.kind != "kept":
            self._current = outcome.deployed
            self._since_s = time.time()
            self._hit_rate = self._current.promised
        self._ended(outcome.kind, outcome.message)

    def _ended(self, outcome: str, message: str) -> None:
        self._outcome, self._message = outcome, message
        level = logging.WARNING if outcome == "failed" else logging.INFO
        extra = {"model": self.name, "outcome": outcome, "reason": message, "version": self._current.number}
        _log.log(level, "renewal ended", extra=extra)


def _as_inputs(records: Sequence[Record], served: Served) -> list[Record]:
    """Images as the network takes them; other kinds as they are."""
    found = []
    for record in records:
        if record.kind == "image":
            x = served.model.preprocessing(record.input[None])[0]
            record = replace(record, input=x.numpy(), kind="input")
        found.append(record)
    return found
