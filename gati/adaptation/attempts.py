"""Attempts to find better caches for a stream: when they begin, and what follows.

One begins between two requests, if there is a reason (`gati.adaptation.triggers`), and runs in the
background, or inline if time is simulated. What it finds (`gati.adaptation.renewal`) goes on trial.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from gati.adaptation.deployments import Deployments
from gati.adaptation.renewal import Renewal, RenewalOutcome
from gati.adaptation.samples import Samples
from gati.adaptation.settings import AdaptSettings
from gati.adaptation.succession import Succession, Tell
from gati.adaptation.triggers import Triggers
from gati.errors import GatiError


class Attempts:
    """Looks for better caches by `renewal`, from `samples`, when `triggers` say so.

    `lock` is the caller's, and `tell` is called with changes. `delay_s` is the time from an attempt to the
    trial of what it has found; None: it goes on trial as soon as it is found.
    """

    def __init__(
        self,
        renewal: Renewal,
        deployments: Deployments,
        succession: Succession,
        samples: Samples,
        triggers: Triggers,
        settings: AdaptSettings,
        lock: threading.RLock,
        *,
        delay_s: float | None,
        tell: Tell,
    ) -> None:
        self._renewal, self._deployments, self._succession = renewal, deployments, succession
        self._samples, self._triggers, self._settings = samples, triggers, settings
        self._lock, self._delay_s, self._tell = lock, delay_s, tell
        self._due: tuple[float, RenewalOutcome] | None = None
        self.under_way = False
        self.fitted = False  # a version made for this stream was found
        self._knows_scenes = bool(deployments.scenes())

    def take_due(self, time_s: float) -> None:
        """Put on trial what is due; call it with the lock held."""
        if self._due is not None and time_s >= self._due[0]:
            outcome, self._due = self._due[1], None
            self._take(outcome)

    def next(self, time_s: float) -> Callable[[], None] | None:
        """The attempt to make now, as a job; None without a reason. Call it with the lock held."""
        busy = self.under_way or self._due is not None or self._succession.trial is not None
        if busy or not self._settings.enabled:
            return None
        reason, skipped = self._triggers.due(
            self._samples,
            time_s=time_s,
            known_scenes=self._knows_scenes,
            alarmed=self._succession.alarmed,
        )
        if skipped:
            self._tell("skipped", skipped, {})
        if reason is None:
            return None
        self.under_way = True
        changed_at = self._triggers.changed_at if reason == "hit rate" else None
        return partial(self._attempt, reason, time_s, changed_at)

    def failed(self, why: str) -> None:
        """Report that an attempt failed, and when the next one follows."""
        more = self._triggers.more(self._samples)
        self._tell("failed", f"retraining failed: {why}; next after {more} more samples", {})

    def _attempt(self, reason: str, time_s: float, changed_at: int | None) -> None:
        taken, tried, failed = self._samples.taken, True, True
        why = ""
        try:
            if self._renewal.enough(self._samples, changed_at):
                self._tell("retraining", reason, {})
            current, unproven = self._succession.serving.deployed, frozenset(self._succession.unproven)
            outcome = self._renewal(current, self._samples, reason, changed_at, unproven=unproven)
            tried = outcome is not None
            with self._lock:
                if outcome is not None and self._delay_s is not None:
                    self._due = (time_s + self._delay_s, outcome)
                elif outcome is not None:
                    self._take(outcome)
            failed = False
        except GatiError as error:
            why = str(error)
        finally:
            with self._lock:
                self.under_way = False
                taken = self._samples.taken if failed else taken  # those that came meanwhile do not count
                self._triggers.attempted(taken=taken, time_s=time_s, tried=tried, failed=failed)
        if why:
            self.failed(why)

    def _take(self, outcome: RenewalOutcome) -> None:
        self._succession.take(outcome)
        if outcome.kind != "kept":
            self.fitted = True
            self._knows_scenes = bool(self._deployments.scenes())
