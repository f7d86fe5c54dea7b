"""Admission control for one model or pipeline: its load and service times, known before a request is read.

Each model has its own estimates, so that a flood of requests for one does not affect another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from gati.errors import OverloadError
from services.quantile import RunningQuantile

_IN_TIME = 0.98  # of admitted requests should be
_RECOVERY = 0.98  # of what is expected outside the services, for each request that is refused
_FEW = 8  # requests at a time are always read: their service says whether it has time for them
_FORGOTTEN_S = 1.0  # since a service refused
_WINDOW_S = 30.0  # what was asked for counts so long at least, and twice that at most


class CrowdedError(OverloadError):
    """A request is refused at the door. There may be thousands a second: it gets no line in the log."""


class Demand(NamedTuple):
    """What a request asks for: its SLO (infinite without one), its inputs, and its priority (1 is first)."""

    slo_ms: float
    inputs: int = 1
    priority: int = 1

    @classmethod
    def of(cls, slo_ms: float | None, inputs: int, priority: int) -> Demand:
        """`slo_ms` is None without an SLO."""
        return cls(math.inf if slo_ms is None else slo_ms, inputs, priority)


class _Range(NamedTuple):
    """What several requests asked for. `easiest` has the best of each, whichever request that is of."""

    easiest: Demand
    least_slo_ms: float

    def has(self, demand: Demand) -> bool:
        """Whether one that asks for this changes nothing."""
        return demand == self.easiest and demand.slo_ms >= self.least_slo_ms

    def with_(self, other: _Range) -> _Range:
        one, two = self.easiest, other.easiest
        easiest = Demand(
            max(one.slo_ms, two.slo_ms), min(one.inputs, two.inputs), min(one.priority, two.priority)
        )
        return _Range(easiest, min(self.least_slo_ms, other.least_slo_ms))


_NOTHING = _Range(Demand(0.0, 2**31, 2**31), math.inf)


class Entrance:
    """The requests for one model or pipeline. `clock` is in seconds.

    When a service has refused one for overload, those that follow are refused before they are read while as
    many are at work: reading and passing on what will be refused costs as much as an answer. Answers let
    more in again, slowly, and a second without such a refusal lets in all. Only the refusal of a request
    that asked for no more than any other of late says something of the others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.at_work = 0  # requests under way that have been read
        self.outside = RunningQuantile(_IN_TIME)  # ms of requests: here and on the way, not in a service
        self._clock = clock
        self._asked = 0  # of services, and neither answered nor refused yet
        self._most = math.inf  # of those that are let in
        self._now = self._before = _NOTHING  # what was asked for, in this window and in the one before
        self._began_s = -math.inf
        self._refused_s = -math.inf
        self._retry_after_s: float | None = None

    @property
    def least_slo_ms(self) -> float:
        """The smallest SLO of late, infinite where there was none."""
        self._turn()
        return min(self._now.least_slo_ms, self._before.least_slo_ms)

    @property
    def _most_slo_ms(self) -> float:
        """The largest SLO of late, infinite where there was none or nothing is known."""
        self._turn()
        return max(self._now.easiest.slo_ms, self._before.easiest.slo_ms) or math.inf

    def check(self, elapsed_ms: float = 0.0) -> None:
        """Refuse a request that came `elapsed_ms` ago and would be answered late. Raises `CrowdedError`."""
        if self.at_work >= _FEW and elapsed_ms >= self._most_slo_ms:
            raise CrowdedError(
                f"{elapsed_ms:.0f} ms have passed before the request was read",
                retry_after_s=1e-3 * elapsed_ms,
            )
        if self._asked + 1 > self._most and not self._forgotten:
            raise CrowdedError(
                f"{self._asked} requests are at work, and no more would be answered in time",
                retry_after_s=self._retry_after_s,
            )

    def asking(self, demand: Demand) -> _Asking:
        """Count a request while services are asked, and learn from it when they refuse it."""
        self._turn()
        if not self._now.has(demand):
            self._now = self._now.with_(_Range(demand, demand.slo_ms))
        return _Asking(self, demand)

    def answered(self, outside_ms: float) -> None:
        """Record how long an answered request spent outside a service."""
        self.outside.add(outside_ms)

    def refused(self) -> None:
        """Record a refusal for overload: a wrong estimate could keep out the requests that correct it."""
        self.outside.shrink(_RECOVERY)

    def _ended(self, demand: Demand, error: BaseException | None) -> None:
        if error is None:
            self._most += 1.0 / self._most
        elif isinstance(error, OverloadError):
            self._learn(demand, error)
        self._asked -= 1

    def _learn(self, demand: Demand, error: OverloadError) -> None:
        if self._now.with_(self._before).easiest != demand:
            return
        if self._forgotten:
            self._most = math.inf
        self._most = min(self._most, float(max(_FEW, self._asked - 1)))
        self._refused_s, self._retry_after_s = self._clock(), error.retry_after_s

    @property
    def _forgotten(self) -> bool:
        return self._clock() - self._refused_s > _FORGOTTEN_S

    def _turn(self) -> None:
        """Begin a new window when it is time."""
        now_s = self._clock()
        if now_s - self._began_s > _WINDOW_S:
            self._before = self._now if now_s - self._began_s <= 2 * _WINDOW_S else _NOTHING
            self._now, self._began_s = _NOTHING, now_s


class _Asking:
    """Services are asked for a request."""

    def __init__(self, entrance: Entrance, demand: Demand) -> None:
        self._entrance, self._demand = entrance, demand

    def __enter__(self) -> None:
        self._entrance._asked += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entrance._ended(self._demand, error)
