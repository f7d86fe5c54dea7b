"""Requests that wait while a lost replica restarts, which takes seconds.

Meanwhile the other replicas are overloaded, and would refuse requests that still have time. So requests
without an SLO wait here in order of arrival until any replica has room for them, as long as their timeouts
allow. They also wait for a while after the replica is back, until the backlog is cleared. If no replica is
lost, requests are refused under overload.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

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


class Parking:
    """Sends requests to the replicas of one model. `replicas` returns them, and `clock` seconds."""

    def __init__(
        self, replicas: Callable[[], Sequence[_Watched]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._replicas = replicas
        self._clock = clock
        self._lost_s: dict[int, float] = {}  # by number: when the loss was noticed
        self._parked: deque[asyncio.Future[None]] = deque()
        self._woken = 0  # requests that may continue, but whose tasks have not yet resumed
        self._behind_until_s = -math.inf  # until then there may be a backlog, because a replica has come back
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
        end_s = self._clock() + asked.time_remaining_ms / 1e3
        waits = bool(self._parked) and asked.latency_slo_ms is None
        if waits and not self._may_wait(inputs, asked, end_s):
            raise OverloadError(
                f"{self.parked} requests already wait for a replica to restart", retry_after_s=1.0
            )
        try:
            if waits:
                await self._place(end_s, first=False)
                asked = self._left(asked, end_s)
            while True:
                try:
                    return await once(asked)
                except OverloadError:
                    if not self._may_wait(inputs, asked, end_s):
                        raise
                    self._most = max([1, *(each.load.outstanding for each in self._ready())])
                await self._place(end_s, first=True)
                asked = self._left(asked, end_s)
        finally:
            if self._parked:
                self.look()

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
        while self._parked and room > 0:
            turn = self._parked.popleft()
            if not turn.done():
                turn.set_result(None)
                self._woken += 1
                room -= 1

    def _left(self, asked: Asked, end_s: float) -> Asked:
        """Return the parameters with the time that remains after waiting."""
        return asked._replace(time_remaining_ms=max(1.0, 1e3 * (end_s - self._clock())))

    def _ready(self) -> list[_Watched]:
        return [each for each in self._replicas() if each.ready]

    def _may_wait(self, inputs: int, asked: Asked, end_s: float) -> bool:
        """Whether a request may wait: it has no SLO, a replica is lost or just back, and time allows it."""
        self.look()
        now_s, ready = self._clock(), self._ready()
        if asked.latency_slo_ms is not None or not ready:
            return False
        away = any(now_s - since_s <= _BACK_WITHIN_S for since_s in self._lost_s.values())
        if not away and now_s > self._behind_until_s:
            return False
        ahead = len(self._parked) + sum(each.load.outstanding for each in ready)
        # Speeds are added: a replica that has just started may be slow, but does not slow down the others.
        inputs_a_s = sum(1.0 / each_s for each in ready if (each_s := each.load.seconds_an_input))
        return ahead + inputs <= _SAFETY * (end_s - now_s) * (inputs_a_s or math.inf)

    async def _place(self, end_s: float, *, first: bool) -> None:
        """Wait at the front (`first`) or the end of the queue until there is room. Raises `DeadlineError`."""
        turn = asyncio.get_running_loop().create_future()
        (self._parked.appendleft if first else self._parked.append)(turn)
        try:
            async with asyncio.timeout(end_s - self._clock()):
                await turn
        except TimeoutError:
            raise DeadlineError("the deadline passed while a replica was restarted") from None
        finally:
            if turn.done() and not turn.cancelled():
                self._woken -= 1
            else:
                with suppress(ValueError):  # `look` has taken it out since it was cancelled
                    self._parked.remove(turn)
