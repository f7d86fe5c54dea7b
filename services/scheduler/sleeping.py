"""A model whose processes stop while it gets no requests: how long it has been idle, how long a start takes.

A request that finds a model asleep starts it, and waits if it has the time. The last start tells how long
that takes. A start that takes several times as long is a fault like any other: from then on requests are
refused with its cause, and the server is no longer ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

ASLEEP = "it is asleep; the next request starts it"

_PATIENCE = 3.0  # a start may take so many times the expected time
_LEAST_S = 5.0  # and at least so long


class Sleep:
    """Whether a model is asleep or waking. Not thread-safe: call from the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None  # the start under way
        self._woken = False  # by a request
        self._asked_s = clock()
        self._under_way = 0
        self.asleep = False
        self.start_s: float | None = None  # duration of the last start

    @property
    def waking(self) -> bool:
        """Whether a request started it, and the start does not take too long yet."""
        if not self._woken or self._began_s is None or self.start_s is None:
            return False
        return self._clock() - self._began_s < _longest_s(self.start_s)

    @property
    def busy(self) -> bool:
        """Whether it is being started, or has requests."""
        return self._under_way > 0 or self._began_s is not None

    @property
    def idle_s(self) -> float:
        """For how long it has been ready without a request."""
        return 0.0 if self.busy else self._clock() - self._asked_s

    @property
    def expected_s(self) -> float:
        """The expected time until it answers."""
        elapsed_s = 0.0 if self._began_s is None else self._clock() - self._began_s
        return max(0.0, (self.start_s or 0.0) - elapsed_s)

    def asked(self) -> _Asked:
        """Count a request while it is under way."""
        return _Asked(self)

    def fall_asleep(self) -> None:
        """Call when its processes are about to be stopped."""
        self.asleep, self._began_s = True, None

    def begin(self, *, woken: bool) -> None:
        """Call when its processes are being started, `woken` by a request."""
        self.asleep, self._woken, self._began_s = False, woken, self._clock()

    def end(self) -> None:
        """Call when it is unloaded: no request starts it."""
        self.asleep, self._began_s = False, None

    def answers(self) -> None:
        """Call when it is ready: the start, if one was under way, is complete."""
        if self._began_s is None:
            return
        self._asked_s = self._clock()
        took_s = self._asked_s - self._began_s
        # One that failed until somebody mended it must not be expected to take as long again.
        self.start_s = took_s if self.start_s is None else min(took_s, _longest_s(self.start_s))
        self._began_s = None


class _Asked:
    """A request is under way."""

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
    """How long a start may take that is expected to take `start_s`."""
    return max(_PATIENCE * start_s, _LEAST_S)
