"""The queue in front of a runner: bounded, ordered by priority, with a deadline for every input.

Waiting inputs are dropped when their deadline passes or their caller disconnects. Admission refuses inputs
that would miss their latency SLO according to measured service times, so a burst does not delay the inputs
that arrived before it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gati.errors import (
    CancelledError,
    DeadlineError,
    GatiError,
    OverloadError,
    UnavailableError,
)
from services.inference.service_times import ServiceTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gati.engine.exits import Prediction
    from services.inference.runner import Runner
    from services.pausing import Takes

_log = logging.getLogger("gati.inference")

_TRY_AFTER_S = 0.5  # since the last input was queued
_MANY = 20  # consecutive refusals
_FEW_LEFT = 64  # abandoned inputs that may stay in the heap
_BEFORE_REQUESTS = 0  # a priority
_SUSPICIOUS = 5  # failures of the engine in a row, without an answer between them


@dataclass(eq=False)
class Ask:
    """One input in the queue. Times are from `time.monotonic`: an event loop's clock may be coarser."""

    queue: RequestQueue
    x: Tensor
    priority: int
    deadline_s: float
    arrived_s: float
    expected_s: float  # from arrival to answer
    answer: asyncio.Future[Prediction]
    started_s: float | None = None
    expiry: asyncio.TimerHandle | None = None
    running: Future[Prediction] | None = field(default=None, repr=False)

    @property
    def succeeded(self) -> bool:
        """Whether it has an answer."""
        return self.answer.done() and self.answer.exception() is None


class Places:
    """Places in a queue, reserved for admitted inputs; a context manager that frees them."""

    def __init__(self, queue: RequestQueue, count: int, priority: int) -> None:
        self._queue = queue
        self._count, self._priority = count, priority
        queue._reserve(count, priority)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Free them, before the inputs are put or when they are dropped; idempotent."""
        count, self._count = self._count, 0
        self._queue._reserve(-count, self._priority)


class RequestQueue:
    """Feeds one runner. Not thread-safe: call from the event loop."""

    def __init__(self, runner: Runner, *, capacity: int, times: ServiceTimes) -> None:
        self.times = times
        self._runner = runner
        self._capacity = capacity
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[int, int, Ask]] = []
        self._order = itertools.count()
        self._count = 0  # waiting inputs that are not abandoned
        self._reserved = 0  # inputs admitted but not put yet
        self._counts: Counter[int] = Counter()  # both, by priority
        self._running: set[Ask] = set()
        self._closed = False
        self._put_s = time.monotonic()  # when the last input was put
        self._refused = 0  # inputs refused since then
        self._failures = 0  # of the engine, since its last answer
        self._checked: Ask | None = None  # the network's example, after failures
        self._broken = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        """Number of inputs that wait or have a reserved place, without abandoned ones."""
        return self._count + self._reserved

    @property
    def running(self) -> int:
        """Number of inputs that the runner executes."""
        return len(self._running)

    @property
    def takes(self) -> Takes:
        """The cores that the runner takes for inputs."""
        return self._runner.takes

    def working_s(self) -> float:
        """How long the oldest running input has been executing."""
        now_s = time.monotonic()
        started = (ask.started_s for ask in self._running if ask.started_s is not None)
        return now_s - min(started, default=now_s)

    def broken(self, example: Callable[[], Tensor]) -> bool:
        """Whether the engine fails for every input, not only for some clients' inputs. Call it repeatedly.

        After several failures in a row it is given `example()` [1, ...], which the network can answer.
        """
        if self._failures < _SUSPICIOUS or self._closed:
            return False
        if self._checked is None:
            self._checked = self.put(example(), priority=0, deadline_s=math.inf)
        elif self._checked.answer.done():  # it failed: an answer would have ended the failures
            self._broken, self._checked = True, None
        return self._broken

    def _first(self, priority: int) -> int:
        """Number of inputs that wait or have a place, and start before a new one of that priority."""
        return sum(count for each, count in self._counts.items() if each <= priority)

    def _ahead(self, priority: int) -> int:
        """As `_first`, with those that run."""
        return len(self._running) + self._first(priority)

    def _wait_s(self, ahead: int) -> float:
        return max(0, ahead + 1 - self._runner.parallel) * self.times.seconds_an_input

    def _together(self, ahead: int, inputs: int) -> int:
        """Number of inputs that run once the last of `inputs` new ones has started."""
        return min(self._runner.parallel, ahead + inputs)

    def reserve(self, inputs: int, priority: int, latency_slo_s: float | None) -> Places:
        """Admit inputs and reserve places until they are put. Raises as `admit`."""
        self.admit(inputs, priority, latency_slo_s)
        return Places(self, inputs, priority)

    def admit(self, inputs: int, priority: int, latency_slo_s: float | None) -> None:
        """Refuse inputs if those that go first fill the queue, or if they would be late.

        Raises `OverloadError`, `UnavailableError`.
        """
        if self._closed:
            raise UnavailableError("this version is being unloaded; try again", retry_after_s=0.1)
        # One free place is enough for any request: if a batch needed more, single inputs would keep it out.
        # Inputs of lower priorities take none, so each priority can fill the queue once.
        if (first := self._first(priority)) >= self._capacity:
            raise OverloadError(
                f"the queue is full ({first} inputs go first; requests are accepted below {self._capacity})",
                retry_after_s=self.times.seconds_an_input * (first - self._capacity + 1),
            )
        if latency_slo_s is not None:
            self._check_slo(inputs, priority, latency_slo_s)

    def _check_slo(self, inputs: int, priority: int, latency_slo_s: float) -> None:
        # An idle service judges by its shortest times and, after many refusals in a row, accepts an input in
        # any case: otherwise estimates made under load, even of another program, would never be corrected.
        if self.waiting or self._running:
            ahead = self._ahead(priority)
            wait_s = self._wait_s(ahead + inputs - 1)  # of the last one
            expected_s, tries = wait_s + self.times.bound_s(self._together(ahead, inputs)), False
        else:
            expected_s = self.times.least_s * max(1.0, inputs / self._runner.parallel)
            tries = self._refused >= _MANY and time.monotonic() - self._put_s > _TRY_AFTER_S
        if expected_s > latency_slo_s and not tries:
            self._refused += 1
            left_s = max(0.0, latency_slo_s)
            raise OverloadError(
                f"expected to take {1e3 * expected_s:.1f} ms, but {1e3 * left_s:.1f} ms of the SLO are left",
                retry_after_s=max(expected_s - latency_slo_s, self.times.seconds_an_input),
            )

    def put(self, x: Tensor, *, priority: int, deadline_s: float) -> Ask:
        """Queue one input; its `answer` raises `DeadlineError` once the deadline (may be infinite) passes."""
        self._refused = 0
        now_s = self._put_s = time.monotonic()
        ahead = self._ahead(priority)
        expected_s = self._wait_s(ahead) + self.times.expected_s(self._together(ahead, 1))
        ask = Ask(self, x, priority, deadline_s, now_s, expected_s, self._loop.create_future())
        if deadline_s != math.inf:
            ask.expiry = self._loop.call_later(max(0.0, deadline_s - now_s), self._expire, ask)
        heapq.heappush(self._waiting, (priority, next(self._order), ask))
        self._wait(ask, 1)
        self._empty.clear()
        self._pump()
        return ask

    def drop(self, ask: Ask) -> None:
        """Drop an input: it is not started or, if it is running, stops at the next segment."""
        self._end(ask, CancelledError("the caller cancelled the request"))

    def promote(self, ask: Ask) -> None:
        """Let an input that still waits start before all requests."""
        if ask.started_s is None and not ask.answer.done():
            heapq.heappush(self._waiting, (_BEFORE_REQUESTS, next(self._order), ask))

    async def close(self) -> None:
        """Refuse new inputs, wait until all are answered, and stop the runner."""
        self._closed = True
        while self.waiting or self._running:
            await self._empty.wait()
        await self._loop.run_in_executor(None, self._runner.close)

    # ----------------------------------------------------------------------------------------------------

    def _reserve(self, count: int, priority: int) -> None:
        self._reserved += count
        self._counts[priority] += count
        if self._reserved:
            self._empty.clear()
        else:
            self._pump()

    def _wait(self, ask: Ask, count: int) -> None:
        """Count an input that begins (`count` 1) or ends (-1) to wait."""
        self._count += count
        self._counts[ask.priority] += count

    def _pump(self) -> None:
        while self._waiting and len(self._running) < self._runner.parallel:
            ask = heapq.heappop(self._waiting)[2]
            if ask.answer.done() or ask.started_s is not None:  # a promoted one is there twice
                continue
            self._wait(ask, -1)
            ask.started_s = time.monotonic()
            if ask.started_s >= ask.deadline_s:
                self._fail(ask, DeadlineError("the deadline passed in the queue"))
                continue
            self._start(ask)
        if len(self._waiting) > 2 * self._count + _FEW_LEFT:  # most of them have expired
            self._waiting = [each for each in self._waiting if not each[2].answer.done()]
            heapq.heapify(self._waiting)
        if not (self.waiting or self._running):
            self._waiting.clear()
            self._empty.set()

    def _start(self, ask: Ask) -> None:
        try:
            ask.running = self._runner.submit(ask.x)
        except GatiError as error:
            self._fail(ask, error)
            return
        self._running.add(ask)
        at_start = len(self._running)
        ask.running.add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(self._finished, ask, done, at_start)
        )

    def _finished(self, ask: Ask, done: Future[Prediction], at_start: int) -> None:
        self._running.discard(ask)
        if done.cancelled():
            error: BaseException | None = CancelledError("the caller cancelled the request")
        else:
            error = done.exception()
        self._count_failure(error)
        if error is None and ask.started_s is not None:
            took_s = time.monotonic() - ask.started_s
            self.times.add(took_s, running=(at_start + len(self._running) + 1) / 2)
            if ask.deadline_s != math.inf:  # what no client waits for may wait for long
                self.times.surprise.add(time.monotonic() - ask.arrived_s - ask.expected_s)
        if not ask.answer.done():
            if error is None:
                self._settle(ask)
                ask.answer.set_result(done.result())
            else:
                self._fail(ask, _own(error))
        self._pump()

    def _count_failure(self, error: BaseException | None) -> None:
        if error is None:
            self._failures, self._broken, self._checked = 0, False, None
        elif not isinstance(error, GatiError):
            self._failures += 1
            if self._failures <= _SUSPICIOUS:  # the same again would only fill the log
                _log.error("the engine failed", exc_info=error)

    def _expire(self, ask: Ask) -> None:
        where = "in the queue" if ask.started_s is None else "while the network ran"
        self._end(ask, DeadlineError(f"the deadline passed {where}"))

    def _end(self, ask: Ask, error: GatiError) -> None:
        if ask.answer.done():
            return
        if ask.running is not None:
            ask.running.cancel()
        else:
            self._wait(ask, -1)
        self._fail(ask, error)
        self._pump()

    def _fail(self, ask: Ask, error: GatiError) -> None:
        self._settle(ask)
        if not ask.answer.done():
            ask.answer.set_exception(error)
            ask.answer.exception()  # marks it as retrieved, as no one may wait for it

    def _settle(self, ask: Ask) -> None:
        if ask.expiry is not None:
            ask.expiry.cancel()


def _own(error: BaseException) -> GatiError:
    """The error that callers get for a failure of the engine; another replica may do better."""
    if isinstance(error, GatiError):
        return error
    return UnavailableError(f"the engine failed: {type(error).__name__}")
