"""The service's part: samples from access logs, candidates fitted to them, trials, and versions.

It fits as often as `Reuse`. Each candidate is tried on the following requests, and is published only if it
missed fewer blocks than the active version. After a restart, other state is rebuilt from the logs.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gati.documents import values_of
from gati.errors import GatiError, RepositoryError, StorageError, TraceError
from gati.evict.learn.folder import MODEL, versions_of
from gati.evict.learn.following import fetch_model
from gati.evict.learn.reading import AccessRecord
from gati.evict.learn.trial import TrialOutcome, VersionTrial
from gati.evict.predict.hazard import HazardModel
from gati.evict.predict.history import FEATURES, RequestHistory
from gati.evict.predict.reuse import ReuseSettings
from gati.evict.predict.samples import ReuseSamples
from gati.evict.predict.stored import model_files
from gati.versions.lineage import Lineage, SampleWindow
from gati.versions.repository import ModelRepository

_log = logging.getLogger("gati.eviction")

_KEPT = 5  # versions
_MOST_ENGINES = 32  # engines with a history
_CONTRACT = hashlib.sha256(json.dumps(FEATURES).encode()).hexdigest()  # the same for all versions


@dataclass(eq=False)
class _Clock:
    """The time of an engine's latest request, by the clock of its own machine."""

    now_s: float


class VersionFitter:
    """Processes records in order, and stores versions in `folder`.

    A version that cannot be published, because the disk is full or the folder is not writable, is published
    later. `trial_capacities` is the length of a trial, in multiples of the cache's capacity.
    """

    def __init__(self, folder: Path, settings: ReuseSettings, *, trial_capacities: float = 8.0) -> None:
        self._repository = ModelRepository(versions_of(folder))
        self._settings = settings
        self._trial_capacities = trial_capacities
        self._samples = ReuseSamples(settings.window)
        # by engine, the most recently active last
        self._histories: OrderedDict[str, tuple[RequestHistory, _Clock]] = OrderedDict()
        # of each sample's engine: samples of one engine must not age by the clock of another
        self._clocks = np.full(settings.window, _Clock(0.0), dtype=object)
        self._figures: dict[str, dict[str, Any]] = {}
        self._due = settings.first_fit
        self._first_s = self._last_s = 0.0  # of all requests
        self._trial: VersionTrial | None = None
        self._waiting: tuple[HazardModel, TrialOutcome] | None = None  # won its trial, not yet on disk
        self._counts = dict.fromkeys(
            ("records", "requested", "hit", "no_tree", "fits", "adopted", "lost_trials"), 0
        )
        self._last_trial: TrialOutcome | None = None
        self.version, self._active = self._stored()

    def take(self, record: AccessRecord) -> None:
        """Learn from a request; fit a candidate or end a trial when due."""
        counts = self._counts
        counts["records"] += 1
        counts["requested"] += len(record.ids)
        counts["hit"] += record.hits
        if record.figures:
            self._figures[record.engine] = dict(record.figures)
        self._last_s = max(self._last_s, record.time_s)
        self._first_s = self._first_s or record.time_s
        history, clock = self._history(record)
        clock.now_s = now_s = max(clock.now_s, record.time_s)
        before = self._samples.taken_in_all
        try:
            history.access(record.ids, counts["records"], now_s)
            self._clocks[np.arange(before, self._samples.taken_in_all) % self._settings.window] = clock
            if self._trial is not None:
                self._trial.take(record.engine, record.capacity_blocks, record.ids, now_s)
        except TraceError:
            counts["no_tree"] += 1
            return
        self._judge()
        if self._trial is None and self._samples.taken_in_all >= self._due:
            self._fit()

    def publish_waiting(self) -> None:
        """Publish the model that won its trial, if one is pending. Raises StorageError, RepositoryError."""
        if self._waiting is None:
            return
        model, outcome = self._waiting
        trial = values_of(outcome)
        window = SampleWindow(self._samples.taken_in_all, self._first_s, self._last_s, "access log")
        lineage = Lineage(_CONTRACT, parent=self.version, window=window, measurements=trial)
        number = self._repository.publish(MODEL, model_files(model, trial), lineage)
        self._repository.activate(MODEL, number)
        self.version, self._active, self._waiting = number, model, None
        self._counts["adopted"] += 1
        _log.info("published", extra={"version": number, **trial})
        self._repository.collect_garbage(MODEL, keep=_KEPT)

    def status(self) -> dict[str, Any]:
        """What was read, fitted and published, as JSON values, with the last reported counts of engines."""
        engines, trial = self._figures.values(), self._trial
        told = {
            name: sum(int(figures.get(name, 0)) for figures in engines)
            for name in ("evicted", "caught", "guard_excess")
        }
        return {
            **self._counts,
            **told,
            "engines": len(self._histories),
            "samples": self._samples.taken_in_all,
            "next_fit_at": self._due,
            "version": self.version or 0,
            "trial": None if trial is None else {"requested": trial.requested, "excess": trial.excess},
            "last_trial": {} if self._last_trial is None else values_of(self._last_trial),
            "waits_for_disk": self._waiting is not None,
        }

    def _history(self, record: AccessRecord) -> tuple[RequestHistory, _Clock]:
        """The engine's history and clock. Beyond the limit, the least recently active engine's is dropped."""
        histories = self._histories
        if record.engine not in histories:
            most = self._settings.history_blocks * record.capacity_blocks
            histories[record.engine] = RequestHistory(most, self._samples), _Clock(record.time_s)
            if len(histories) > _MOST_ENGINES:
                gone, _ = histories.popitem(last=False)
                self._figures.pop(gone, None)
                if self._trial is not None:
                    self._trial.forget(gone)
        histories.move_to_end(record.engine)
        return histories[record.engine]

    def _fit(self) -> None:
        self._due = max(self._settings.due_after(self._due), self._samples.taken_in_all + 1)
        clocks = self._clocks[: self._samples.taken_in_all]
        now_s = np.fromiter((clock.now_s for clock in clocks), float, len(clocks))
        model = self._settings.fit(self._samples.labels(now_s), seed=self._counts["fits"])
        if model is None:
            return
        self._counts["fits"] += 1
        self._trial = VersionTrial(model, self._active, length_capacities=self._trial_capacities)

    def _judge(self) -> None:
        trial = self._trial
        verdict = None if trial is None else trial.verdict
        if trial is None or verdict is None:
            return
        self._trial = None
        self._last_trial = TrialOutcome(
            verdict=verdict, requested=trial.requested, excess=trial.excess, against=self.version or 0
        )
        _log.info("trial ended", extra=values_of(self._last_trial))
        if verdict == "lost":
            self._counts["lost_trials"] += 1
            return
        self._waiting = trial.candidate, self._last_trial
        try:
            self.publish_waiting()
        except (StorageError, RepositoryError) as error:
            _log.warning(
                "a version could not be published; this will be retried", extra={"reason": str(error)}
            )

    def _stored(self) -> tuple[int | None, HazardModel | None]:
        """The active version, if it can be read."""
        try:
            number = self._repository.active(MODEL)
            if number is None:
                return None, None
            return number, fetch_model(self._repository, number)
        except GatiError as error:
            _log.warning("the active version cannot be read", extra={"reason": str(error)})
            return None, None
