"""Requests that wait while a lost replica restarts, which takes seconds, or after their model was woken.

Meanwhile replicas are overloaded, and would refuse requests that still have time. So requests without an SLO
wait here, by priority and then by arrival, until any replica has room for them, as long as their timeouts
allow. They also wait for a while after the replica is back, until the backlog is cleared, and so does a
backlog that gathered while the model was started. Otherwise requests are refused under overload.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from gati.errors import DeadlineError, OverloadError
from services.scheduler.choice import ReplicaLoad
from services.scheduler.replicas import Asked

_BACK_WITHIN_S = 30.0  # a replica that is lost for longer is not waited for
_DONE_WITHIN_S = 30.0  # to clear the backlog; for two replicas at 80 % load, 1.5 times the outage
_SAFETY = 0.7  # of the remaining time: estimates are not more precise


class _Watched(Protocol):
    """A replica: `info` is None until it has been ready for the first time."""

    number: int
    info: Any
    load: ReplicaLoad
    wanted: bool

    @property
    def ready(self) -> bool:
        """Whether it accepts requests."""
        ...


class _Parked(NamedTuple):
    """A waiting request; they sort by their turns. `number` counts arrivals."""

    priority: int
    number: int
    turn: asyncio.Future[None]


class Parking:
    """Sends requests to the replicas of one model. `replicas` returns them, and `clock` seconds."""

    def __init__(
        self, replicas: Callable[[], Sequence[_Watched]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._replicas = replicas
        self._clock = clock
        self._lost_s: dict[int, float] = {}  # by number: when the loss was noticed
        self._parked: list[_Parked] = []  # sorted
        self._arrivals = itertools.count()
        self._woken = 0  # requests that may continue, but whose tasks have not yet resumed
        self._behind_until_s = -math.inf  # until then there may be a backlog
        self._most = math.inf  # inputs that a replica is known to accept

    @property
    def parked(self) -> int:
        """The number of waiting requests."""
        return len(self._parked)

    async def ask(self, once: Callable[[Asked], Awaitable[Any]], inputs: int, asked: Asked) -> Any:
        """Return the answer of `once`, which sends the request to a replica.

        If the replica refuses it for overload and it may wait, it waits here, and `once` is called again.

        **Raises:** `OverloadError` if it may not wait, `DeadlineError` if no replica had room in time, and
        the errors of `once`.
        """
        end_s, number = self._clock() + asked.time_remaining_ms / 1e3, next(self._arrivals)
        waits = bool(self._parked) and asked.latency_slo_ms is None
        if waits and not self._may_wait(inputs, asked, end_s):
            raise OverloadError(f"{self.parked} requests already wait for a replica", retry_after_s=1.0)
        try:
            while True:
                if waits:
                    await self._wait(asked.priority, number, end_s)
                    asked = asked._replace(time_remaining_ms=max(1.0, 1e3 * (end_s - self._clock())))
                try:
                    return await once(asked)
                except OverloadError:
                    if not self._may_wait(inputs, asked, end_s):
                        raise
                    waits = True
                self._most = max([1, *(each.load.outstanding for each in self._ready())])
        finally:
            if self._parked:
                self.look()

    def started(self) -> None:
        """Call for requests that waited for the model to start: they may be more than it accepts at once."""
        self._behind_until_s = self._clock() + _DONE_WITHIN_S

    def look(self) -> None:
        """Let waiting requests continue if there is room. Call it when a replica changes its state, too."""
        now_s, replicas, ready = self._clock(), self._replicas(), self._ready()
        if any(each.number in self._lost_s for each in ready):
            self._behind_until_s = now_s + _DONE_WITHIN_S
        self._lost_s = {
            each.number: self._lost_s.get(each.number, now_s)
            for each in replicas
            if each.wanted and each.info is not None and not each.ready
        }
        room = sum(self._most - each.load.outstanding for each in ready) - self._woken
        if not any(each.wanted for each in replicas):  # unloaded: all are told so
            room = math.inf
        while self._parked and room > 0:
            turn = self._parked.pop(0).turn
            if not turn.done():
                turn.set_result(None)
                self._woken += 1
                room -= 1

    def _ready(self) -> list[_Watched]:
        return [each for each in self._replicas() if each.ready]

    def _may_wait(self, inputs: int, asked: Asked, end_s: float) -> bool:
        """Whether a request may wait: it has no SLO, there may be a backlog, and time allows it."""
        self.look()
        now_s, ready = self._clock(), self._ready()
        if asked.latency_slo_ms is not None or not ready:
            return False
        away = any(now_s - since_s <= _BACK_WITHIN_S for since_s in self._lost_s.values())
        if not away and now_s > self._behind_until_s:
            return False
        ahead = bisect.bisect_right(self._parked, asked.priority, key=attrgetter("priority"))
        ahead += sum(each.load.outstanding for each in ready)
        # Speeds are added: a replica that has just started may be slow, but does not slow down the others.
        inputs_a_s = sum(1.0 / each_s for each in ready if (each_s := each.load.seconds_an_input))
        return ahead + inputs <= _SAFETY * (end_s - now_s) * (inputs_a_s or math.inf)

    async def _wait(self, priority: int, number: int, end_s: float) -> None:
        """Wait until there is room and the request's turn has come. Raises `DeadlineError`."""
        turn = asyncio.get_running_loop().create_future()
        parked = _Parked(priority, number, turn)
        bisect.insort(self._parked, parked)
        try:
            async with asyncio.timeout(end_s - self._clock()):
                await turn
        except TimeoutError:
            raise DeadlineError("the deadline passed before a replica had room") from None
        finally:
            if turn.done() and not turn.cancelled():
                self._woken -= 1
            else:
                with suppress(ValueError):  # `look` has taken it out since it was cancelled
                    self._parked.remove(parked)
