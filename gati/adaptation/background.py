"""Background work: in a low-priority thread, or inline if time is simulated."""

from __future__ import annotations

import gc
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from gati.engine.graph.apart import converting_apart
from gati.engine.threads import work_alongside
from gati.priority import RunningRequests, alongside, let_requests_pass, take_turns_often

Job = Callable[[], None]

_NICENESS = 10
_AUDITS_WAITING = 512
_JOBS_WAITING = 8  # retrainings, and openings of proven settings
_LATE_S, _LATE_JOBS = 2.0, 8  # a few jobs of a slow network may take longer
_TOLD_EVERY_S = 60.0

_log = logging.getLogger(__name__)


class Worker(Protocol):
    """Runs jobs in the order of submission."""

    threaded: bool  # whether jobs run in a separate thread

    @property
    def late(self) -> bool:
        """Whether jobs wait for so long that what they find comes late."""

    def reserve(self) -> bool:
        """Reserve a slot in the queue for a later job; False if the queue is full."""

    def release(self) -> None:
        """Release a reserved slot that will not be used."""

    def submit(self, job: Job, *, reserved: bool = False) -> bool:
        """Submit a job, to a `reserved` slot if so; False if the queue is full and it was dropped."""

    def wait(self, deadline_s: float) -> bool:
        """Wait at most `deadline_s` seconds until no job is left; returns whether all are done."""

    def close(self, deadline_s: float) -> None:
        """Drop queued jobs; the running job has `deadline_s` seconds to finish."""


class Inline:
    """Runs each job immediately, in the caller's thread."""

    threaded = False
    late = False

    def reserve(self) -> bool:
        """There is always a free slot."""
        return True

    def release(self) -> None:
        """Does nothing: there are no slots."""

    def submit(self, job: Job, *, reserved: bool = False) -> bool:
        """Run the job."""
        job()
        return True

    def wait(self, deadline_s: float) -> bool:
        """Returns True: nothing is ever queued."""
        return True

    def close(self, deadline_s: float) -> None:
        """Does nothing: there is nothing to close."""


class Failures:
    """Logs failures that may come with every request: one a minute, and how many there were before it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_s = -math.inf
        self._untold = 0

    def tell(self, what: str) -> None:
        """Log the exception that is being handled, with its traceback, unless one was logged just before."""
        now_s = self._clock()
        if now_s - self._told_s < _TOLD_EVERY_S:
            self._untold += 1
            return
        more = f" ({self._untold} more since the last such line)" if self._untold else ""
        _log.exception("%s%s", what, more)
        self._told_s, self._untold = now_s, 0


class Background:
    """A thread of low priority that computes with one torch thread; at most `limit` jobs wait.

    A failed job is logged and its error passed to `on_error`; the next one runs. So that serving threads do
    not stall, jobs convert networks in a separate process, let `requests` pass between their steps, threads
    take turns in the interpreter often, and the garbage collector skips all earlier objects, until `close`.
    """

    threaded = True

    def __init__(
        self,
        name: str,
        *,
        limit: int,
        on_error: Callable[[Exception], None] | None = None,
        requests: RunningRequests | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._clock = limit, clock
        self._requests = requests or RunningRequests()
        self._on_error = on_error
        self._jobs: deque[tuple[float, Job]] = deque()  # since when it waits, and the job
        self._reserved = 0
        self._busy = self._closed = False
        self._failures = Failures()
        self._changed = threading.Condition()
        _spare_others(1)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def late(self) -> bool:
        """Whether several jobs wait, the first of them for more than two seconds."""
        with self._changed:
            return len(self._jobs) >= _LATE_JOBS and self._clock() - self._jobs[0][0] > _LATE_S

    def reserve(self) -> bool:
        """Reserve a slot in the queue; False if it is full or closed."""
        with self._changed:
            if self._closed or self._full:
                return False
            self._reserved += 1
            return True

    def release(self) -> None:
        """Release a reserved slot."""
        with self._changed:
            self._reserved -= 1

    @property
    def _full(self) -> bool:
        return len(self._jobs) + self._reserved >= self._limit

    def submit(self, job: Job, *, reserved: bool = False) -> bool:
        """Queue it and return at once; False if the queue is full or closed."""
        with self._changed:
            self._reserved -= reserved
            if self._closed or (self._full and not reserved):
                return False
            self._jobs.append((self._clock(), job))
            self._changed.notify_all()
            return True

    def wait(self, deadline_s: float) -> bool:
        """Wait until the queue is empty and no job is running."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout=deadline_s)

    def close(self, deadline_s: float) -> None:
        """Refuse further jobs and drop those in the queue."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(deadline_s)
        if first:
            _spare_others(-1)

    def _run(self) -> None:
        work_alongside(_NICENESS)
        with converting_apart(), alongside(self._requests):
            while (job := self._next()) is not None:
                self._do(job)

    def _do(self, job: Job) -> None:
        let_requests_pass()
        try:
            job()
        except Exception as error:  # serving continues whatever fails here
            self._failures.tell("work in the background failed")
            if self._on_error is not None:
                self._on_error(error)

    def _next(self) -> Job | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return None
            self._busy = True
            return self._jobs.popleft()[1]


class Workers(NamedTuple):
    """The background work of a stream: audits in one, retrainings and what opens engines in another."""

    auditing: Worker
    training: Worker

    def wait(self, deadline_s: float) -> bool:
        """Wait at most `deadline_s` seconds for each; returns whether all jobs are done."""
        return self.auditing.wait(deadline_s) and self.training.wait(deadline_s)


def in_line() -> Workers:
    """Workers for simulated time."""
    return Workers(Inline(), Inline())


def in_background(requests: RunningRequests, on_error: Callable[[Exception], None]) -> Workers:
    """Workers in threads that let `requests` pass; `on_error` gets the errors of retrainings."""
    return Workers(
        Background("gati-audits", limit=_AUDITS_WAITING, requests=requests),
        Background("gati-retraining", limit=_JOBS_WAITING, on_error=on_error, requests=requests),
    )


_open = 0
_opening = threading.Lock()
_interval_s = 0.0  # between turns of threads before any was open


def _spare_others(more: int) -> None:
    """Keep the interpreter free for other threads while any thread is open; `more` are opened or closed.

    Threads take turns often, and the garbage collector skips existing objects. Torch with a network has half
    a million of these; retraining makes the collector scan them all, which blocks every thread for a quarter
    of a second.
    """
    global _open, _interval_s
    with _opening:
        before, _open = _open, _open + more
        if before == 0:
            gc.collect()  # collect now: later collections skip these objects
            gc.freeze()
            _interval_s = sys.getswitchinterval()
            take_turns_often()
        elif _open == 0:
            gc.unfreeze()
            sys.setswitchinterval(_interval_s)
