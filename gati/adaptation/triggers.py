"""When to retrain: the interval is over, the guard is in alarm, or fewer requests hit than was promised."""

from __future__ import annotations

import math

from gati.adaptation.samples import Samples
from gati.adaptation.settings import AdaptSettings

__all__ = ["Triggers"]

_MEMORY = 0.99  # of the running hit rate
_SETTLED = 200  # requests after which it says something
_NOTICED = 70  # requests until a fall shows in it


class Triggers:
    """Follows requests and says why it is time to retrain, if it is."""

    def __init__(self, settings: AdaptSettings, least_inputs: int) -> None:
        self._settings = settings
        self._least_inputs = least_inputs
        self._next_at = 0  # samples taken in all before the next attempt
        self._last_s: float | None = None
        self._since = 0
        self.changed_at: int | None = None  # the request since when fewer hit than promised
        self._rate = 0.0
        self.promised = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Of the last hundred requests or so; None before the first."""
        return self._rate / (1.0 - _MEMORY**self._since) if self._since else None

    def answered(self, request: int, *, hit: bool, time_s: float) -> None:
        """Tell what became of a request."""
        self._since += 1
        self._rate = _MEMORY * self._rate + (1.0 - _MEMORY) * hit
        floor = self._settings.falls_to * self.promised
        low = self._since >= _SETTLED and (self.hit_rate or 0.0) < floor
        if not low:
            self.changed_at = None
        elif self.changed_at is None:
            self.changed_at = request - _NOTICED
        self._last_s = time_s if self._last_s is None else self._last_s

    def replaced(self, promised: float) -> None:
        """Caches that promise that hit rate serve from now on."""
        self._since, self._rate, self.promised = 0, 0.0, promised
        self.changed_at = None

    def attempted(self, *, taken: int, time_s: float, tried: bool) -> None:
        """An attempt was made after `taken` samples; where it was `tried`, many new ones are waited for."""
        self._next_at = taken + max(10, self._least_inputs // (4 if tried else 20))
        if tried:
            self._last_s = time_s

    def missed(self, samples: Samples, *, time_s: float) -> bool:
        """Whether the interval has passed with too few samples to retrain on; then another one begins."""
        self._last_s = time_s if self._last_s is None else self._last_s
        over = time_s - self._last_s >= self._settings.interval_s
        if not over or len(samples) >= self._least_inputs:
            return False
        self._last_s = time_s
        return True

    def reason(self, samples: Samples, *, time_s: float, known_scenes: bool, alarmed: bool) -> str | None:
        """`alarm`, `hit rate` or `interval`; None while there is no reason or too little was sampled.

        Where fewer requests hit, what was sampled before says nothing about what comes now: new samples are
        waited for. After an alarm they are not, for the caches are on probation anyway.
        """
        if samples.taken < self._next_at:
            return None
        enough = len(samples) >= self._least_inputs
        if alarmed:
            return "alarm" if enough or known_scenes else None
        if self.changed_at is not None:
            fresh = samples.count(self.changed_at) >= self._least_inputs
            return "hit rate" if fresh or known_scenes else None
        last_s = math.inf if self._last_s is None else self._last_s
        return "interval" if enough and time_s - last_s >= self._settings.interval_s else None
