"""When to retrain: after an alarm, when fewer requests hit than promised, or when the interval has passed.

`due` decides, for streams and for the adaptation service. A stream sees every request, the service only the
samples that inference services store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gati.adaptation.samples import Samples
from gati.adaptation.settings import AdaptSettings

SETTLED = 200  # requests or samples until their hit rate is meaningful
_MEMORY = 0.99  # decay of the running hit rate
_NOTICED = 70  # requests until a drop shows in it
_MOST_DOUBLINGS = 3  # of the samples to wait for, if retraining fails each time


@dataclass(frozen=True)
class Signs:
    """The observed state of the serving caches. `waited_s`: seconds since the last attempt.

    `samples` is the number to train on, `fresh` of them since the hit rate fell. `known_scenes`: earlier
    versions exist that may fit without training.
    """

    samples: int
    fresh: int
    waited_s: float
    alarmed: bool = False
    fewer_hits: bool = False
    known_scenes: bool = False


class Due(NamedTuple):
    """The reason to retrain now: `alarm`, `hit rate`, `interval` or None. `skipped`: why it is put off."""

    reason: str | None
    skipped: str = ""


def due(signs: Signs, *, interval_s: float, least: int, kept: int | None = None) -> Due:
    """Whether to retrain now, which takes `least` samples; the window holds at most `kept`.

    After a drop of the hit rate it waits for new samples, as earlier ones do not represent current requests.
    After an alarm it does not wait, as the caches are on probation anyway.
    """
    enough, over = signs.samples >= least, signs.waited_s >= interval_s
    reason = None
    if signs.alarmed:
        reason = "alarm" if enough or signs.known_scenes else None
    elif signs.fewer_hits:
        reason = "hit rate" if signs.fresh >= least or signs.known_scenes else None
    elif enough and over:
        reason = "interval"
    skips = reason is None and over and not enough
    return Due(reason, too_few(signs.samples, least, kept) if skips else "")


def too_few(count: int, least: int, kept: int | None = None) -> str:
    """A message that this number of samples is not enough."""
    said = f"{count} samples, {least} are needed"
    if kept is not None and kept < least:
        said += f", but only {kept} are kept: set window_inputs to {least} or more"
    return said


class Triggers:
    """Follows requests and decides when and why to retrain."""

    def __init__(self, settings: AdaptSettings, least_inputs: int) -> None:
        self._settings = settings
        self._least_inputs = least_inputs
        self._next_at = 0  # total samples before the next attempt
        self._failures = 0  # attempts in a row that failed
        self._last_s: float | None = None
        self._since = 0
        self.changed_at: int | None = None  # the request since when fewer hit than promised
        self._rate = 0.0
        self.promised = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Hit rate of about the last hundred requests; None before the first."""
        return self._rate / (1.0 - _MEMORY**self._since) if self._since else None

    def answered(self, request: int, *, hit: bool, time_s: float) -> None:
        """Record whether a request hit."""
        self._since += 1
        self._rate = _MEMORY * self._rate + (1.0 - _MEMORY) * hit
        floor = self._settings.falls_to * self.promised
        low = self._since >= SETTLED and (self.hit_rate or 0.0) < floor
        if not low:
            self.changed_at = None
        elif self.changed_at is None:
            self.changed_at = request - _NOTICED
        self._last_s = time_s if self._last_s is None else self._last_s

    def replaced(self, promised: float) -> None:
        """Start over with new caches and their promised hit rate."""
        self._since, self._rate, self.promised = 0, 0.0, promised
        self.changed_at = None

    def attempted(self, *, taken: int, time_s: float, tried: bool, failed: bool = False) -> None:
        """Record an attempt after `taken` samples; if `tried`, the next waits for many more samples.

        Each attempt in a row that `failed` doubles them, from the first one on.
        """
        if not tried:
            self._next_at = taken + max(10, self._least_inputs // 20)
            return
        self._failures = min(self._failures + 1, _MOST_DOUBLINGS) if failed else 0
        self._next_at = taken + max(10, self._least_inputs // 4) * 2**self._failures
        self._last_s = time_s

    def more(self, samples: Samples) -> int:
        """How many more samples the next attempt waits for."""
        return max(0, self._next_at - samples.taken)

    def due(self, samples: Samples, *, time_s: float, known_scenes: bool, alarmed: bool) -> Due:
        """Whether to retrain at `time_s`; an interval with too few samples starts over."""
        self._last_s = time_s if self._last_s is None else self._last_s
        found = due(
            Signs(
                len(samples),
                len(samples) if self.changed_at is None else samples.count(self.changed_at),
                time_s - self._last_s,
                alarmed,
                self.changed_at is not None,
                known_scenes,
            ),
            interval_s=self._settings.interval_s,
            least=self._least_inputs,
        )
        if found.skipped:
            self._last_s = time_s
            if samples.taken > len(samples):  # some are too old: that so few are kept lies in `window_s`
                window_s = self._settings.window_s
                advice = f", but only those of the last {window_s:g} s are kept: set window_s to more"
                found = found._replace(skipped=found.skipped + advice)
        return found if samples.taken >= self._next_at else Due(None, found.skipped)
