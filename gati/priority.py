"""Who computes first: priorities of processes, turns of threads, and requests before other work."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType

_SWITCH_S = 1e-5
_LONGEST_S = 0.1  # so that work in the background goes on if a request hangs


def take_turns_often() -> None:
    """Let the threads of this process take turns in the Python interpreter every 10 microseconds.

    Python's own interval is 5 ms. A thread that runs a network releases the interpreter in each of its
    hundreds of operations. While another thread computes in Python, for example opens a version, it gets the
    interpreter back only after that interval: a request of 7 ms took more than a second.
    """
    sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))


def give_way(niceness: int) -> None:
    """Let the calling process use only what others leave of the processor. 0 changes nothing.

    It gets the class of idle processes, which any other preempts at once: with a low priority alone, it may
    finish its time slice first while a request waits. Where there is no such class, `niceness` counts. Later
    threads inherit both. Nothing that a request waits for may run in such a process.
    """
    if hasattr(os, "nice"):
        os.nice(max(niceness - os.nice(0), 0))
    if niceness and hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # forbidden by some sandboxes
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class RunningRequests:
    """The requests that a process is answering; each is a `with` block. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = self._ended = 0
        self.waiting = 0  # threads that let requests pass

    def __enter__(self) -> None:
        with self._changed:
            self._running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._running -= 1
            self._ended += 1
            if self.waiting:
                self._changed.notify_all()

    def let_pass(self) -> float:
        """Wait until as many requests have ended as are running now, at most `_LONGEST_S`.

        Returns the seconds.
        """
        if not self._running:
            return 0.0
        began_s = time.perf_counter()
        with self._changed:
            enough = self._ended + self._running
            self.waiting += 1
            self._changed.wait_for(lambda: not self._running or self._ended >= enough, _LONGEST_S)
            self.waiting -= 1
        return time.perf_counter() - began_s


@contextmanager
def alongside(requests: RunningRequests) -> Iterator[None]:
    """Inside the context, `let_requests_pass` in this thread lets these requests pass."""
    token = _requests.set(requests)
    try:
        yield
    finally:
        _requests.reset(token)


def let_requests_pass() -> float:
    """Wait for running requests to end, if this thread works alongside some. Returns the seconds.

    Long work calls this between its steps. Threads of one process share the Python interpreter, the
    processor's caches and memory, whatever their priorities.
    """
    requests = _requests.get()
    return 0.0 if requests is None else requests.let_pass()


_requests: ContextVar[RunningRequests | None] = ContextVar("_requests", default=None)
