"""Clocks that only tests turn."""

from __future__ import annotations

from collections.abc import Callable

from gati.costs.disturbance import Machine


class MadeUp(Machine):
    """Time goes on by what requests are said to take; `waiting(number)` is the share without a core."""

    def __init__(self, waiting: Callable[[int], float | None] = lambda number: 0.0) -> None:
        self._waiting = waiting
        self._now_ns = 0
        self._waited_ns = 0
        self._requests = 0

    def request(self, milliseconds: float) -> None:
        """Let so much time go by."""
        self._now_ns += round(milliseconds * 1e6)
        self._waited_ns += round(milliseconds * 1e6 * (self._waiting(self._requests) or 0.0))
        self._requests += 1

    def now_ns(self) -> int:
        """As `Machine.now_ns`."""
        return self._now_ns

    def waited_ns(self) -> int | None:
        """As `Machine.waited_ns`."""
        return None if self._waiting(self._requests) is None else self._waited_ns
