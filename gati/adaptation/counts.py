"""Counts of the requests of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from gati.engine.exits import BASE
from gati.guard.auditor import RECALL

_MEMORY = 0.99  # decay of the running hit rate


@dataclass
class RequestCounts:
    """Requests since the start, and how many of them exited early; `recalled` are those that memory answered.

    `now_s` is the time of the latest request. Requests that the base model answers because audits are `late`
    say nothing about the recent hit rate. Not thread-safe.
    """

    requests: int = 0
    hits: int = 0
    recalled: int = 0
    now_s: float = 0.0
    _timely: int = field(default=0, repr=False)  # requests in the running mean
    _hit_rate: float = field(default=0.0, repr=False)  # running mean, as if there were none before the first

    def answered(self, exit: str, time_s: float, *, late: bool = False) -> None:
        """Count a request of that time, and where it exited."""
        hit = exit != BASE
        self.now_s = time_s
        self.requests += 1
        self.hits += hit
        self.recalled += exit == RECALL
        if not late:
            self._timely += 1
            self._hit_rate = _MEMORY * self._hit_rate + (1.0 - _MEMORY) * hit

    @property
    def recent_hit_rate(self) -> float | None:
        """Hit rate of about the last hundred requests; None before the first."""
        return self._hit_rate / (1.0 - _MEMORY**self._timely) if self._timely else None
