"""A model whose processes stop while nobody asks it: since when it is idle, and how long a start takes.

The request that finds a model asleep starts it, and waits for it if it has the time. How long that takes is
known from the last start. A start that takes several times as long is a fault like any other: requests are
refused with its cause from then on, and the server is no longer ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["ASLEEP", "Sleep"]

ASLEEP = "it is asleep; the next request starts it"

_PATIENCE = 3.0  # times the expected time, which a start may take
_LEAST_S = 5.0  # that it may take


class Sleep:
    """Whether a model is asleep or waking, by what it is told. Belongs to the event loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None  # the start under way
        self._woken = False  # by a request
        self._asked_s = clock()
        self._under_way = 0
        self.asleep = False
        self.start_s: float | None = None  # that the last start took

    @property
    def waking(self) -> bool:
        """Whether it was woken, and will answer soon as far as is known."""
        if not self._woken or self._began_s is None or self.start_s is None:
            return False
        return self._clock() - self._began_s < max(_PATIENCE * self.start_s, _LEAST_S)

    @property
    def busy(self) -> bool:
        """Whether it is being started, or asked."""
        return self._under_way > 0 or self._began_s is not None

    @property
    def idle_s(self) -> float:
        """For how long it has been there and nobody has asked it."""
        return 0.0 if self.busy else self._clock() - self._asked_s

    @property
    def expected_s(self) -> float:
        """The expected time until it answers."""
        elapsed_s = 0.0 if self._began_s is None else self._clock() - self._began_s
        return max(0.0, (self.start_s or 0.0) - elapsed_s)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Count a request while it is under way."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            self._asked_s = self._clock()

    def fall_asleep(self) -> None:
        """Its processes are about to be stopped."""
        self.asleep, self._began_s = True, None

    def begin(self, *, woken: bool) -> None:
        """Its processes are being started, `woken` by a request."""
        self.asleep, self._woken, self._began_s = False, woken, self._clock()

    def end(self) -> None:
        """It was unloaded: no request starts it."""
        self.asleep, self._began_s = False, None

    def answers(self) -> None:
        """It is ready: the start, if one was under way, is complete."""
        if self._began_s is not None:
            self._asked_s = self._clock()
            self.start_s, self._began_s = self._asked_s - self._began_s, None
