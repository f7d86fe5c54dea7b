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
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from gati.errors import DeadlineError, OverloadError
from services.scheduler.replicas import Asked, RefusedError, Replica

_BACK_WITHIN_S = 30.0  # a replica that is lost for longer is not waited for
_DONE_WITHIN_S = 30.0  # to clear the backlog; for two replicas at 80 % load, 1.5 times the outage
_SAFETY = 0.7  # of the remaining time: estimates are not more precise


class _Parked(NamedTuple):
    """A waiting request; they sort by their turns. `number` counts arrivals."""

    priority: int
    number: int
    inputs: int
    turn: asyncio.Future[None]


class Parking:
    """Sends requests to the replicas of one model. `replicas` returns them, and `clock` seconds."""

    def __init__(
        self, replicas: Callable[[], Sequence[Replica]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._replicas = replicas
        self._clock = clock
        self._lost_s: dict[int, float] = {}  # by number: when the loss was noticed
        self._parked: list[_Parked] = []  # sorted
        self._inputs: Counter[int] = Counter()  # of these, by priority
        self._arrivals = itertools.count()
        self._woken = 0  # inputs of requests that may continue, but whose tasks have not yet resumed
        self._behind_until_s = -math.inf  # until then there may be a backlog
        self._full_at = math.inf  # outstanding inputs of all at the last refusal, until a request has ended
        self._idle: set[int] = set()  # numbers of replicas that were ready and had nothing to do then
        self._most = math.inf  # outstanding inputs with which a replica accepts a request, as refusals tell

    @property
    def parked(self) -> int:
        """The number of waiting requests."""
        return len(self._parked)

    async def ask(self, once: Callable[[Asked], Awaitable[Any]], inputs: int, asked: Asked) -> Any:
        """Return the answer of `once`, which sends the request to a replica.

        If the replica refuses it for overload and it may wait, it waits here, and `once` is called again.

        **Raises:** `OverloadError` if it may not wait, `DeadlineError` if no replica had room in time, and
        the errors of `once`, of which `RefusedError` is a replica's refusal.
        """
        end_s, number = self._clock() + asked.time_remaining_ms / 1e3, next(self._arrivals)
        if self._parked:
            self.look()
        ahead = bool(self._parked) and self._parked[0].priority <= asked.priority
        waits = ahead and asked.latency_slo_ms is None
        if waits and not self._may_wait(inputs, asked, end_s):
            raise OverloadError(f"{self.parked} requests already wait for a replica", retry_after_s=1.0)
        refused: RefusedError | None = None
        try:
            while True:
                if waits:
                    await self._wait(asked.priority, number, inputs, end_s)
                    asked = asked._replace(time_remaining_ms=max(1.0, 1e3 * (end_s - self._clock())))
                refused = None
                try:
                    return await once(asked)
                except RefusedError as error:
                    refused, ready = error, self._ready()
                    busy = sum(each.load.outstanding for each in ready)
                    self._full_at, self._idle = busy or math.inf, _idle(ready)
                    if not (busy and self._may_wait(inputs, asked, end_s)):  # idle: no answer makes room
                        raise
                    waits, most = True, max(0, error.outstanding - 1)
                    self._most = min(self._most, most) if self._parked else most
        finally:
            if refused is None:
                self._full_at = math.inf
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
        unloaded = not any(each.wanted for each in replicas)  # then all are told so
        while self._parked and (unloaded or self._has_room(ready)):
            parked = self._parked[0]
            self._take_out(parked)
            if not parked.turn.done():
                parked.turn.set_result(None)
                self._woken += parked.inputs

    def _ready(self) -> list[Replica]:
        return [each for each in self._replicas() if each.ready]

    def _take_out(self, parked: _Parked) -> None:
        self._parked.remove(parked)
        self._inputs[parked.priority] -= parked.inputs

    def _has_room(self, ready: Sequence[Replica]) -> bool:
        """Whether one of these replicas accepts a request, after those that were woken."""
        outstanding = [each.load.outstanding for each in ready]
        if _idle(ready) <= self._idle and sum(outstanding) >= self._full_at:
            return False  # it would be sent where the last one was
        return sum(max(0.0, self._most + 1 - each) for each in outstanding) > self._woken

    def _may_wait(self, inputs: int, asked: Asked, end_s: float) -> bool:
        """Whether a request may wait: it has no SLO, there may be a backlog, and time allows it."""
        self.look()
        now_s, ready = self._clock(), self._ready()
        if asked.latency_slo_ms is not None or not ready:
            return False
        away = any(now_s - since_s <= _BACK_WITHIN_S for since_s in self._lost_s.values())
        if not away and now_s > self._behind_until_s:
            return False
        ahead = sum(count for each, count in self._inputs.items() if each <= asked.priority)
        ahead += self._woken + sum(each.load.outstanding for each in ready)
        # Speeds are added: a replica that has just started may be slow, but does not slow down the others.
        inputs_a_s = sum(1.0 / each_s for each in ready if (each_s := each.load.seconds_an_input))
        return ahead + inputs <= _SAFETY * (end_s - now_s) * (inputs_a_s or math.inf)

    async def _wait(self, priority: int, number: int, inputs: int, end_s: float) -> None:
        """Wait until there is room and the request's turn has come. Raises `DeadlineError`."""
        turn = asyncio.get_running_loop().create_future()
        parked = _Parked(priority, number, inputs, turn)
        bisect.insort(self._parked, parked)
        self._inputs[priority] += inputs
        try:
            async with asyncio.timeout(end_s - self._clock()):
                await turn
        except TimeoutError:
            raise DeadlineError("the deadline passed before a replica had room") from None
        finally:
            if turn.done() and not turn.cancelled():
                self._woken -= inputs
            elif parked in self._parked:  # else `look` has taken it out since it was cancelled
                self._take_out(parked)


def _idle(ready: Sequence[Replica]) -> set[int]:
    """The numbers of those that have nothing to do."""
    return {each.number for each in ready if not each.load.outstanding}
