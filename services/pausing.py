"""Requests before retraining: inference processes pause the adaptation process while they answer.

Its low priority does not suffice: it computes on a core that is idle, and shares memory, caches and on many
machines the core itself with what answers. Where a network was asked and another one trained on two cores,
the 99th percentile was 1.75 times as high as without training, with pauses 1.05 times.

All processes share a small memory: who may be paused now, since when it is, and how many cores the requests
of each process take. The adaptation process is paused while these are half of the cores or more, because two
of what the system calls cores often are one. It keeps a share of the time, and is never paused for long.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import mmap
import os
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

_LONGEST_S = 0.2  # of a pause, and of several with less than `_LEAST_RUN_S` between them
_LEAST_RUN_S = 0.02  # after so long a pause
_TIMERS_S = 0.002  # that a timer may be early
_PID = struct.Struct("<q")  # of the adaptation process; 0: none
_TIMES = struct.Struct("<dddd")  # `_Times`
_PID_AT, _TIMES_AT, _COMPUTES_AT, _CORES_AT = 0, 8, 40, 64
_PROCESSES = 192  # most inference processes; each has a byte for the number of cores that its requests take
_SIZE = _CORES_AT + _PROCESSES
_MOST = 255
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger("gati.pausing")


@cache
def can_pause() -> bool:
    """Whether this system has what pauses need: Linux 5.3 or newer, and no sandbox that forbids it."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


@contextmanager
def shared_memory() -> Iterator[Path | None]:
    """Inside the context, the memory that the processes of this user share; None where they cannot pause."""
    if not can_pause():
        yield None
        return
    with ExitStack() as stack:
        path = None
        try:
            memory = os.memfd_create("gati-pausing")
            stack.callback(os.close, memory)
            os.ftruncate(memory, _SIZE)
            found = Path(f"/proc/{os.getpid()}/fd/{memory}")
            if os.path.samestat(found.stat(), os.fstat(memory)):  # in /proc of another container it is not
                path = found
        except OSError as error:
            _without_pauses(error)
        yield path


class _Times(NamedTuple):
    """When the adaptation process was paused and ran, in seconds of the system's clock."""

    since_s: float = 0.0  # since when it has been paused, but for short times; 0: never
    runs_s: float = 0.0  # since when it runs; 0 during a pause
    ran_s: float = 0.0  # the sum of those short times
    until_s: float = 0.0  # it is not paused before


class _Shared:
    """The shared memory. Locks on its bytes, which end with a process, say which processes live."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.memory = mmap.mmap(self._file, _SIZE)  # both stay open: closing one would release all locks

    def lock(self, at: int) -> bool:
        """Lock a byte until this process ends or `unlock`; False if another process has it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
        except OSError:
            return False
        return True

    def unlock(self, at: int) -> None:
        """Release a locked byte."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, at)

    @property
    def pid(self) -> int:
        """The adaptation process; 0 if there is none."""
        return int(_PID.unpack_from(self.memory, _PID_AT)[0])

    @pid.setter
    def pid(self, pid: int) -> None:
        _PID.pack_into(self.memory, _PID_AT, pid)

    @property
    def computes(self) -> bool:
        """Whether the adaptation process may be paused now."""
        return bool(self.memory[_COMPUTES_AT])

    @computes.setter
    def computes(self, computes: bool) -> None:
        self.memory[_COMPUTES_AT] = computes

    @property
    def times(self) -> _Times:
        """When it was paused and ran."""
        return _Times(*_TIMES.unpack_from(self.memory, _TIMES_AT))

    @times.setter
    def times(self, times: _Times) -> None:
        _TIMES.pack_into(self.memory, _TIMES_AT, *times)

    @property
    def cores(self) -> int:
        """How many cores the requests of all processes take."""
        return sum(self.memory[_CORES_AT:_SIZE])


def _opened(path: Path | None) -> _Shared | None:
    if path is None or not can_pause():
        return None
    try:
        return _Shared(path)
    except OSError as error:
        _without_pauses(error)
        return None


def _without_pauses(error: OSError) -> None:
    _log.info("retraining is not paused while requests are answered", extra={"reason": str(error)})


class Pausable:
    """The adaptation process, which may be paused while it computes. Without a `path` it never is."""

    def __init__(self, path: Path | None) -> None:
        self._shared = _opened(path)
        self._locked = False
        if self._shared is not None:  # it could not see that its parent is gone while it is paused
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside the context, this process may be paused."""
        if self._shared is None or not self._lock(self._shared):
            yield
            return
        self._shared.computes = True
        try:
            yield
        finally:
            self._shared.computes = False

    def _lock(self, shared: _Shared) -> bool:
        """Whether this process has the lock, which others take for a moment to see whether it lives."""
        if not self._locked and shared.lock(_PID_AT):
            shared.computes, shared.pid, self._locked = False, os.getpid(), True
        return self._locked


class Takes(NamedTuple):
    """How many cores each request that an engine answers takes, and the most that all of them take.

    A request with several inputs counts as one, though several workers may answer them.
    """

    each: int = 1
    most: int = _MOST


class Pausing:
    """Pauses the adaptation process while requests take half of the `cores`; on the event loop.

    Without a `path` nothing is paused.
    """

    def __init__(self, path: Path | None, cores: int) -> None:
        self._cores = cores
        self._requests: Counter[Takes] = Counter()
        self._paused = False  # by this process, and not let run since
        self._handle: int | None = None  # of the other process; never that of one with the same number
        self._handled_pid = 0
        self._timer: asyncio.TimerHandle | None = None
        self._shared = _opened(path)
        self._own = 0 if self._shared is None else self._place(self._shared)
        if not self._own:
            self._shared = None
        if self._shared is not None:
            self._run(self._shared, _Times())  # the process before it may have been killed during a pause

    @contextmanager
    def answering(self, takes: Takes = Takes()) -> Iterator[None]:  # noqa: B008 - it cannot change
        """Inside the context, a request is answered."""
        self._requests[takes] += 1
        self._look()
        try:
            yield
        finally:
            self._requests[takes] -= 1
            self._look()

    # ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _place(shared: _Shared) -> int:
        """The byte of this process, 0 if all are taken. Those of processes that have ended are cleared."""
        own = 0
        for at in range(_CORES_AT, _SIZE):
            if shared.lock(at):
                shared.memory[at] = 0
                if own:
                    shared.unlock(at)
                own = own or at
        return own

    def _look(self) -> None:
        """Say how many cores are taken, and pause the other process or let it run."""
        shared = self._shared
        if shared is None:
            return
        taken = (min(takes.each * count, takes.most) for takes, count in self._requests.items())
        shared.memory[self._own] = min(max(taken, default=0), _MOST)  # its engines have the same cores
        if not (shared.computes or self._paused):
            return
        times, now_s = shared.times, time.monotonic()
        runs = times._replace(runs_s=times.runs_s or now_s)
        if not (shared.computes and 2 * shared.cores >= self._cores):
            if self._paused or not times.runs_s:
                self._run(shared, runs)
            return
        since_s, ran_s = times.since_s, times.ran_s + (now_s - times.runs_s if times.runs_s else 0.0)
        if not since_s or ran_s >= _LEAST_RUN_S:
            since_s, ran_s = now_s, 0.0
        if now_s - since_s >= _LONGEST_S:
            self._run(shared, _Times(runs_s=now_s, until_s=now_s + _LEAST_RUN_S))
        elif now_s >= times.until_s:
            self._pause(shared, _Times(since_s, ran_s=ran_s, until_s=times.until_s), now_s)
        elif self._paused:  # another process let it run before this one paused it, and wrote so after
            self._run(shared, runs)

    def _pause(self, shared: _Shared, times: _Times, now_s: float) -> None:
        if not self._sent(shared, signal.SIGSTOP):
            return
        self._paused, shared.times = True, times
        if self._timer is None:  # a request may take longer than a pause, and no other one come
            left_s = times.since_s + _LONGEST_S - now_s
            self._timer = asyncio.get_running_loop().call_later(left_s + _TIMERS_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()

    def _run(self, shared: _Shared, times: _Times) -> None:
        """Let the other process run."""
        self._paused = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sent(shared, signal.SIGCONT):
            shared.times = times

    def _sent(self, shared: _Shared, number: signal.Signals) -> bool:
        """Send a signal to the other process; False if there is none."""
        try:
            if self._handle is None or shared.pid != self._handled_pid:
                self._open(shared)
            if self._handle is None:
                return False
            signal.pidfd_send_signal(self._handle, number)
        except ProcessLookupError:
            self._forget()
            return False
        except OSError as error:  # forbidden by some sandboxes
            _without_pauses(error)
            self._forget()
            shared.memory[self._own] = 0
            self._shared = None
            return False
        return True

    def _open(self, shared: _Shared) -> None:
        """Open a handle of the process that may be paused now, if there is one."""
        self._forget()
        if not (pid := shared.pid):
            return
        self._handle, self._handled_pid = os.pidfd_open(pid), pid
        ended = shared.lock(_PID_AT)
        if ended:  # another process may have its number
            shared.computes, shared.pid = False, 0
            shared.unlock(_PID_AT)
        if ended or shared.pid != pid:
            self._forget()

    def _forget(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self._handle, self._handled_pid = None, 0
