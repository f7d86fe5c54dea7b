"""Admission control for one model or pipeline: refuses requests under overload before their bodies are read.

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

_IN_TIME = 0.98  # share of admitted requests that should be answered in time
_RECOVERY = 0.98  # factor on the expected time outside the services, for each request that is refused
_FEW = 8  # so many concurrent requests are always read: the service decides whether it has time for them
_FORGOTTEN_S = 1.0  # after a refusal by a service, the bound is dropped
_WINDOW_S = 30.0  # a demand counts for at least one window and at most two


class CrowdedError(OverloadError):
    """A request is refused before it is read. It is not logged: there may be thousands a second."""


class Demand(NamedTuple):
    """The demands of a request: SLO (infinite without one), number of inputs, priority (1 is the highest)."""

    slo_ms: float
    inputs: int = 1
    priority: int = 1

    @classmethod
    def of(cls, slo_ms: float | None, inputs: int, priority: int) -> Demand:
        """The demand of a request; `slo_ms` is None without an SLO."""
        return cls(math.inf if slo_ms is None else slo_ms, inputs, priority)


class _Recent(NamedTuple):
    """The demands of recent requests.

    `easiest` combines the longest SLO, the fewest inputs and the highest priority, each of any request;
    `least_slo_ms` is the shortest SLO that was met: one that no service can meet sets no standard.
    """

    easiest: Demand = Demand(0.0, 2**31, 2**31)
    least_slo_ms: float = math.inf

    def asked(self, demand: Demand) -> _Recent:
        """With a request that is sent to a service."""
        return self if demand == self.easiest else self._replace(easiest=_easier(self.easiest, demand))

    def answered(self, demand: Demand) -> _Recent:
        """With a request that was answered in time."""
        shorter = demand.slo_ms < self.least_slo_ms
        return self._replace(least_slo_ms=demand.slo_ms) if shorter else self

    def and_(self, other: _Recent) -> _Recent:
        """Those of both."""
        least_slo_ms = min(self.least_slo_ms, other.least_slo_ms)
        return _Recent(_easier(self.easiest, other.easiest), least_slo_ms)


def _easier(one: Demand, two: Demand) -> Demand:
    return Demand(max(one.slo_ms, two.slo_ms), min(one.inputs, two.inputs), min(one.priority, two.priority))


class Entrance:
    """Counts and limits the requests for one model or pipeline. `clock` returns seconds.

    When a service refuses a request for overload, the number of concurrent requests at that time becomes a
    bound, and requests above it are refused before they are read: to read and forward a request that will be
    refused costs as much as an answer. Each answer raises the bound a little; after a second without such a
    refusal there is no bound. Only the refusal of a request that was no harder than any other recent one sets
    the bound: a harder one may be refused when others would not be. If it `plans`, as a pipeline does, a
    longer SLO may lead to another model, perhaps a busy one: its refusal counts only if no shorter was met of
    late, or one that was is refused now, too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, plans: bool = False) -> None:
        self.at_work = 0  # requests in progress whose bodies have been read
        self.outside = RunningQuantile(_IN_TIME)  # ms of a request outside the services: here, on the network
        self._clock = clock
        self._plans = plans
        self._asked = 0  # requests sent to services and not yet answered or refused
        self._most = math.inf  # the bound on `_asked`
        self._now = self._before = _Recent()  # in this window and in the one before
        self._began_s = -math.inf
        self._refused_s = -math.inf
        self._hurried_refused_s = -math.inf  # the last refusal of one with the shortest SLO that was met
        self._retry_after_s: float | None = None

    @property
    def least_slo_ms(self) -> float:
        """The smallest SLO that was met of late, infinite if there was none."""
        self._turn()
        return self._now.and_(self._before).least_slo_ms

    @property
    def _most_slo_ms(self) -> float:
        """The largest recent SLO, infinite if a request had none or there was no request."""
        self._turn()
        return self._now.and_(self._before).easiest.slo_ms or math.inf

    def check(self, elapsed_ms: float = 0.0) -> None:
        """Raise `CrowdedError` if a request that arrived `elapsed_ms` ago would be answered late."""
        if self.at_work >= _FEW and elapsed_ms >= self._most_slo_ms:
            raise CrowdedError(
                f"overloaded: the request waited {elapsed_ms:.0f} ms before it was read",
                retry_after_s=1e-3 * elapsed_ms,
            )
        if self._asked + 1 > self._most and not self._forgotten:
            raise CrowdedError(
                f"{self._asked} requests are in progress, and another would not be answered in time",
                retry_after_s=self._retry_after_s,
            )

    def asking(self, demand: Demand) -> _Asking:
        """A context manager: counts a request while services work on it, and learns if they refuse it."""
        self._turn()
        self._now = self._now.asked(demand)
        return _Asking(self, demand)

    def answered(self, outside_ms: float) -> None:
        """Record how long an answered request spent outside a service."""
        self.outside.add(outside_ms)

    def refused(self) -> None:
        """Lower `outside` after a refusal: an estimate too high would refuse the requests that correct it."""
        self.outside.shrink(_RECOVERY)

    def _ended(self, demand: Demand, error: BaseException | None, took_s: float) -> None:
        if error is None:
            self._most += 1.0 / self._most
            if 1e3 * took_s <= demand.slo_ms:
                self._now = self._now.answered(demand)
        elif isinstance(error, OverloadError):
            self._learn(demand, error)
        self._asked -= 1

    def _learn(self, demand: Demand, error: OverloadError) -> None:
        recent, now_s = self._now.and_(self._before), self._clock()
        if demand == recent.easiest._replace(slo_ms=recent.least_slo_ms):
            self._hurried_refused_s = now_s
        if demand != recent.easiest:
            return
        shorter_met = recent.least_slo_ms < demand.slo_ms and now_s - self._hurried_refused_s > _FORGOTTEN_S
        if self._plans and shorter_met:
            return
        if self._forgotten:
            self._most = math.inf
        self._most = min(self._most, float(max(_FEW, self._asked - 1)))
        self._refused_s, self._retry_after_s = now_s, error.retry_after_s

    @property
    def _forgotten(self) -> bool:
        return self._clock() - self._refused_s > _FORGOTTEN_S

    def _turn(self) -> None:
        """Begin a new window when it is time."""
        now_s = self._clock()
        if now_s - self._began_s > _WINDOW_S:
            self._before = self._now if now_s - self._began_s <= 2 * _WINDOW_S else _Recent()
            self._now, self._began_s = _Recent(), now_s


class _Asking:
    """A request while services work on it, as a context manager."""

    def __init__(self, entrance: Entrance, demand: Demand) -> None:
        self._entrance, self._demand = entrance, demand
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._entrance._asked += 1
        self._began_s = self._entrance._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entrance._ended(self._demand, error, self._entrance._clock() - self._began_s)
