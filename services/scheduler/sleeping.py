"""Scaling to zero: a model whose processes stop while it has no requests; its idle time and its start.

A request for a sleeping model starts it, and waits if it has time. The next start is expected to take as long
as the last one. If it takes several times as long, it has failed: from then on, requests are refused with the
cause, and the server is not ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

ASLEEP = "it is asleep; the next request starts it"

_PATIENCE = 3.0  # a start is overdue after so many times its expected time
_LEAST_S = 5.0  # and not before this time


class Sleep:
    """Whether a model is asleep or waking. Not thread-safe: call from the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None  # when the current start began
        self._woken = False  # whether a request caused the current start
        self._asked_s = clock()
        self._under_way = 0
        self.asleep = False
        self.start_s: float | None = None  # duration of the last start

    @property
    def waking(self) -> bool:
        """Whether a request has started it, and the start is not overdue."""
        if not self._woken or self._began_s is None or self.start_s is None:
            return False
        return self._clock() - self._began_s < _longest_s(self.start_s)

    @property
    def busy(self) -> bool:
        """Whether it is starting, or has requests in progress."""
        return self._under_way > 0 or self._began_s is not None

    @property
    def idle_s(self) -> float:
        """How long it has been without a request since it was ready; 0 while it is busy."""
        return 0.0 if self.busy else self._clock() - self._asked_s

    @property
    def expected_s(self) -> float:
        """The expected time until it is ready."""
        elapsed_s = 0.0 if self._began_s is None else self._clock() - self._began_s
        return max(0.0, (self.start_s or 0.0) - elapsed_s)

    def asked(self) -> _CountedRequest:
        """Return a context manager that counts a request while it is in progress."""
        return _CountedRequest(self)

    def fall_asleep(self) -> None:
        """Call before its processes are stopped because it is idle."""
        self.asleep, self._began_s = True, None

    def begin(self, *, woken: bool) -> None:
        """Call when its processes start; `woken` if a request causes that."""
        self.asleep, self._woken, self._began_s = False, woken, self._clock()

    def end(self) -> None:
        """Call when it is unloaded; then requests do not start it."""
        self.asleep, self._began_s = False, None

    def answers(self) -> None:
        """Call when it is ready; the first such call completes a start."""
        if self._began_s is None:
            return
        self._asked_s = self._clock()
        took_s = self._asked_s - self._began_s
        # A start that failed until somebody fixed the cause must not raise the expected time without limit.
        self.start_s = took_s if self.start_s is None else min(took_s, _longest_s(self.start_s))
        self._began_s = None


class _CountedRequest:
    """Counts a request in progress, as a context manager."""

    def __init__(self, sleep: Sleep) -> None:
        self._sleep = sleep

    def __enter__(self) -> None:
        self._sleep._under_way += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sleep._under_way -= 1
        self._sleep._asked_s = self._sleep._clock()


def _longest_s(start_s: float) -> float:
    """Return the longest time of a start that is expected to take `start_s`."""
    return max(_PATIENCE * start_s, _LEAST_S)
