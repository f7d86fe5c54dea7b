"""Work in the background of requests: in a thread of low priority, or inline where time is simulated."""

from __future__ import annotations

import gc
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from gati.engine.concurrent import let_others_first
from gati.engine.graph.apart import converting_apart

Job = Callable[[], None]

_NICENESS = 10

_log = logging.getLogger(__name__)


class Worker(Protocol):
    """Does jobs in the order they come."""

    threaded: bool  # whether jobs run in a thread of their own

    def reserve(self) -> bool:
        """Keep a place for a job that will be submitted; False if too many wait."""

    def release(self) -> None:
        """Give the place back: the job will not come."""

    def submit(self, job: Job, *, reserved: bool = False) -> bool:
        """Take a job, into the place that is `reserved`; False if too many wait and it was left out."""

    def wait(self, deadline_s: float) -> bool:
        """Wait until no job is left, for at most `deadline_s` seconds; returns whether that is so."""

    def close(self, deadline_s: float) -> None:
        """Drop what waits; the job under way has `deadline_s` seconds to end."""


class Inline:
    """Does each job immediately, in the caller's thread."""

    threaded = False

    def reserve(self) -> bool:
        """There is always a place."""
        return True

    def release(self) -> None:
        """Nothing to be given back."""

    def submit(self, job: Job, *, reserved: bool = False) -> bool:
        """Do it."""
        job()
        return True

    def wait(self, deadline_s: float) -> bool:
        """Nothing ever waits."""
        return True

    def close(self, deadline_s: float) -> None:
        """Nothing to be closed."""


class Background:
    """A thread of low priority that computes with one torch thread; at most `limit` jobs wait.

    A job that fails is logged and passed to `on_error`; the next one runs. To keep serving threads from
    waiting, jobs convert networks in a process of their own, and until it is closed the garbage collector
    skips all objects that were there before.
    """

    threaded = True

    def __init__(self, name: str, *, limit: int, on_error: Callable[[Exception], None] | None = None) -> None:
        self._limit = limit
        self._on_error = on_error
        self._jobs: deque[Job] = deque()
        self._reserved = 0
        self._busy = self._closed = False
        self._changed = threading.Condition()
        _spare_the_old(1)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def reserve(self) -> bool:
        """Keep a place in the queue; False if it is full or closed."""
        with self._changed:
            if self._closed or self._full:
                return False
            self._reserved += 1
            return True

    def release(self) -> None:
        """Give a place back."""
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
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def wait(self, deadline_s: float) -> bool:
        """Wait until the queue is empty and nothing under way."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout=deadline_s)

    def close(self, deadline_s: float) -> None:
        """Take no more jobs and drop those that wait."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(deadline_s)
        if first:
            _spare_the_old(-1)

    def _run(self) -> None:
        torch.set_num_threads(1)
        let_others_first(_NICENESS)
        with converting_apart():
            while (job := self._next()) is not None:
                self._do(job)

    def _do(self, job: Job) -> None:
        try:
            job()
        except Exception as error:  # whatever it is, serving goes on
            _log.exception("work in the background failed")
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
            return self._jobs.popleft()


_open = 0
_opening = threading.Lock()


def _spare_the_old(more: int) -> None:
    """Keep present objects from the garbage collector while any thread is open: `more` of them now.

    Torch with a network has half a million objects; retraining makes the collector scan them all, which
    blocks every thread for a quarter of a second.
    """
    global _open
    with _opening:
        before, _open = _open, _open + more
        if before == 0:
            gc.collect()  # now, as later collections skip them
            gc.freeze()
        elif _open == 0:
            gc.unfreeze()
