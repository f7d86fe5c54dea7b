"""The lag of the event loop: how long a request waited before the scheduler saw it."""

from __future__ import annotations

import asyncio
import time

__all__ = ["LagMeter"]

_INTERVAL_S = 0.004
_FORGETTING = 0.7  # of what is left of a lag at each measurement


class LagMeter:
    """Asks to be called every few milliseconds, and sees how late that is."""

    def __init__(self) -> None:
        self.lag_ms = 0.0
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, in the running event loop."""
        self._due_s = time.monotonic() + _INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._measure)

    def stop(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()

    def _measure(self) -> None:
        late_ms = max(0.0, 1e3 * (time.monotonic() - self._due_s) - 1.0)  # timers are a millisecond coarse
        self.lag_ms = max(late_ms, _FORGETTING * self.lag_ms)
        self.start()
