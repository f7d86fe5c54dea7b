"""The lag of the event loop, which delays requests before the scheduler sees them, and what causes it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

_INTERVAL_S = 0.004
_DECAY = 0.7  # of the worst lag, per measurement
_IN_A_ROW = 5  # measurements
_HALVED_S = 1.0  # the half-life of a count
_LEAST = 0.1  # counts below this are dropped


class LagMeter:
    """How late the event loop has been recently, in milliseconds.

    `waited_ms` is the last measurement: how long a request that is read now may have waited. `lag_ms` is the
    recent maximum, which decays. `standing_ms` is the minimum of the last few measurements: a delay that is
    over by the next one is not overload, but another program that had the processor (CoDel distinguishes a
    standing queue from a burst in this way: Nichols and Jacobson 2012).
    """

    def __init__(self) -> None:
        self.waited_ms = 0.0
        self.lag_ms = 0.0
        self._last_ms: deque[float] = deque([0.0] * _IN_A_ROW, _IN_A_ROW)
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def standing_ms(self) -> float:
        """By how much the loop is constantly late."""
        return min(self._last_ms)

    def add(self, late_ms: float) -> None:
        """Add a measurement."""
        self.waited_ms = late_ms
        self.lag_ms = max(late_ms, _DECAY * self.lag_ms)
        self._last_ms.append(late_ms)

    def start(self) -> None:
        """Start to measure the running event loop."""
        self._due_s = time.monotonic() + _INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._measure)

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()

    def _measure(self) -> None:
        self.add(max(0.0, 1e3 * (time.monotonic() - self._due_s) - 1.0))  # timers are a millisecond coarse
        self.start()


class Shares:
    """How many requests each model has received recently; counts decay with a half-life."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, float] = {}
        self._halved_s = -math.inf

    def add(self, name: str) -> None:
        """Count a request."""
        now_s = self._clock()
        if now_s - self._halved_s >= _HALVED_S:
            share = 0.5 ** min((now_s - self._halved_s) / _HALVED_S, 60.0)
            halved = {each: count * share for each, count in self._counts.items()}
            self._counts = {each: count for each, count in halved.items() if count > _LEAST}
            self._halved_s = now_s
        self._counts[name] = self._counts.get(name, 0.0) + 1.0

    def of_largest(self, name: str) -> float:
        """The requests for one model divided by those for the model with the most, from 0 to 1.

        Unlike a share of all requests, this does not depend on how many models get a request now and then.
        """
        return self._counts.get(name, 0.0) / max(self._counts.values(), default=1.0)
