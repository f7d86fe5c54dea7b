"""The queue in front of a runner: bounded, by priority, and everything in it has a deadline.

What waits is dropped by a timer when its deadline passes, and at once when its caller goes. Admission
refuses what would miss its latency SLO, as far as measured service times tell, so that a burst costs those
who come last instead of everybody.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gati.errors import (
    BackendError,
    CancelledError,
    DeadlineError,
    GatiError,
    OverloadError,
    UnavailableError,
)
from services.inference.service_times import ServiceTimes

if TYPE_CHECKING:
    from torch import Tensor

    from gati.runtime.engine import Prediction
    from services.inference.runner import Runner

__all__ = ["Ask", "RequestQueue"]


_TRY_AFTER_S = 0.5  # without an input
_MANY = 20


@dataclass(eq=False)
class Ask:
    """One input on its way. Times are of `time.monotonic`: a loop's own clock may count in milliseconds."""

    queue: RequestQueue
    x: Tensor
    priority: int
    deadline_s: float
    arrived_s: float
    expected_s: float  # when it arrived, until its answer
    answer: asyncio.Future[Prediction]
    started_s: float | None = None
    expiry: asyncio.TimerHandle | None = None
    running: Future[Prediction] | None = field(default=None, repr=False)


class RequestQueue:
    """Feeds one runner. All methods belong to the event loop's thread."""

    def __init__(self, runner: Runner, *, capacity: int, times: ServiceTimes) -> None:
        self.times = times
        self._runner = runner
        self._capacity = capacity
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[int, int, Ask]] = []
        self._order = itertools.count()
        self._count = 0  # of those waiting that somebody still wants
        self._running = 0
        self._closed = False
        self._put_s = time.monotonic()  # the last input
        self._refused = 0  # since then
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        """Inputs that wait and that somebody still wants."""
        return self._count

    @property
    def running(self) -> int:
        """Inputs that the runner has."""
        return self._running

    def expected_wait_s(self, priority: int = 1) -> float:
        """How long an input of that priority would wait, as far as is known."""
        ahead = self._running + 1 - self._runner.parallel
        ahead += sum(each[0] <= priority and not each[2].answer.done() for each in self._waiting)
        return max(0, ahead) * self.times.seconds_an_input

    def admit(self, inputs: int, priority: int, latency_slo_s: float | None) -> None:
        """Refuse what would not fit, or would be late. Raises `OverloadError`, `UnavailableError`."""
        if self._closed:
            raise UnavailableError("this version is being unloaded; ask again", retry_after_s=0.1)
        if self._count + inputs > self._capacity:
            drained_s = self.times.seconds_an_input * max(1, self._count + inputs - self._capacity)
            raise OverloadError(
                f"the queue is full ({self._count} of {self._capacity} wait)", retry_after_s=drained_s
            )
        if latency_slo_s is None:
            return
        # An idle service tries what it could manage at best and, after refusing many, even more: what it
        # learned under load, its own or another program's, would otherwise keep it from ever learning better.
        if self._count or self._running:
            wait_s = self.expected_wait_s(priority) + (inputs - 1) * self.times.seconds_an_input
            expected_s, tries = wait_s + self.times.bound_s, False
        else:
            expected_s = self.times.least_s * max(1.0, inputs / self._runner.parallel)
            tries = self._refused >= _MANY and time.monotonic() - self._put_s > _TRY_AFTER_S
        if expected_s > latency_slo_s and not tries:
            self._refused += 1
            raise OverloadError(
                f"expected to take {1e3 * expected_s:.1f} ms where {1e3 * latency_slo_s:.1f} ms are left",
                retry_after_s=max(expected_s - latency_slo_s, self.times.seconds_an_input),
            )

    def put(self, x: Tensor, *, priority: int, deadline_s: float) -> Ask:
        """Queue one input; its `answer` comes, or raises `DeadlineError` when the deadline passes.

        An infinite `deadline_s` never does.
        """
        self._refused = 0
        now_s = self._put_s = time.monotonic()
        expected_s = self.expected_wait_s(priority) + self.times.mean_s
        ask = Ask(self, x, priority, deadline_s, now_s, expected_s, self._loop.create_future())
        if deadline_s != math.inf:
            ask.expiry = self._loop.call_later(max(0.0, deadline_s - now_s), self._expire, ask)
        heapq.heappush(self._waiting, (priority, next(self._order), ask))
        self._count += 1
        self._empty.clear()
        self._pump()
        return ask

    def drop(self, ask: Ask) -> None:
        """Forget an input: what waits is not begun, what runs stops at the next segment."""
        self._end(ask, CancelledError("the caller has gone"))

    async def close(self) -> None:
        """Take nothing new, wait until all is answered, and stop the runner."""
        self._closed = True
        await self._empty.wait()
        await self._loop.run_in_executor(None, self._runner.close)

    # ----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        while self._waiting and self._running < self._runner.parallel:
            ask = heapq.heappop(self._waiting)[2]
            if ask.answer.done():
                continue
            self._count -= 1
            ask.started_s = time.monotonic()
            if ask.started_s >= ask.deadline_s:
                self._fail(ask, DeadlineError("the deadline passed in the queue"))
                continue
            self._start(ask)
        if not (self._count or self._running):
            self._waiting.clear()
            self._empty.set()

    def _start(self, ask: Ask) -> None:
        try:
            ask.running = self._runner.submit(ask.x)
        except GatiError as error:
            self._fail(ask, error)
            return
        self._running += 1
        beside = self._running
        ask.running.add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(self._finished, ask, done, beside)
        )

    def _finished(self, ask: Ask, done: Future[Prediction], beside: int) -> None:
        self._running -= 1
        if done.cancelled():
            error: BaseException | None = CancelledError("the caller has gone")
        else:
            error = done.exception()
        if error is None and ask.started_s is not None:
            took_s = time.monotonic() - ask.started_s
            self.times.add(took_s, beside=(beside + self._running + 1) / 2)
            self.times.surprise.add(time.monotonic() - ask.arrived_s - ask.expected_s)
        if not ask.answer.done():
            if error is None:
                self._settle(ask)
                ask.answer.set_result(done.result())
            else:
                self._fail(ask, _own(error))
        self._pump()

    def _expire(self, ask: Ask) -> None:
        where = "in the queue" if ask.started_s is None else "while it was worked on"
        self._end(ask, DeadlineError(f"the deadline passed {where}"))

    def _end(self, ask: Ask, error: GatiError) -> None:
        if ask.answer.done():
            return
        if ask.running is not None:
            ask.running.cancel()
        else:
            self._count -= 1
        self._fail(ask, error)
        self._pump()

    def _fail(self, ask: Ask, error: GatiError) -> None:
        self._settle(ask)
        if not ask.answer.done():
            ask.answer.set_exception(error)
            ask.answer.exception()  # whoever waited may have gone: not an unheard error

    def _settle(self, ask: Ask) -> None:
        if ask.expiry is not None:
            ask.expiry.cancel()


def _own(error: BaseException) -> GatiError:
    """What a caller is told of a failure in the engine."""
    if isinstance(error, GatiError):
        return error
    return BackendError(f"the engine failed: {type(error).__name__}")
