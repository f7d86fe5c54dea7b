"""Requests before retraining: inference processes pause the adaptation process while they answer.

Its low priority does not suffice: it computes on a core that is idle, and shares memory, caches and on many
machines the core itself with what answers. Where a network was asked and another one trained on two cores,
the 99th percentile was 1.75 times as high as without training, with pauses 1.05 times.

All processes share a small file: who may be paused now, since when it is, and how many requests each process
has. The adaptation process is paused where requests may take half of the cores or more, and never for long.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

_LONGEST_S = 0.2  # of a pause: a request may wait for a lock that the paused process holds
_LEAST_RUN_S = 0.02  # after so long a pause
_TIMERS_S = 0.002  # that a timer may be early
_PID = struct.Struct("<q")  # of the process that may be paused; 0: none
_TIMES = struct.Struct("<dd")  # since when it is paused (0: it is not), until when it may not be paused
_PID_AT, _TIMES_AT, _COUNTS_AT = 0, 8, 64
_PROCESSES = 192  # most inference processes; each has a byte for the number of its requests
_SIZE = _COUNTS_AT + _PROCESSES
_MOST = 255

_log = logging.getLogger("gati.pausing")


def make_shared(folder: Path) -> Path:
    """Return the new file that the processes share, in a folder that only this user may enter."""
    path = folder / "shared"
    path.write_bytes(bytes(_SIZE))
    return path


def can_pause() -> bool:
    """Whether this system has what pauses need: Linux 5.3 or newer."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class _Shared:
    """The file in memory. Locks on its bytes, which end with a process, say which processes live."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # stays open: closing it would release all locks
        self.memory = mmap.mmap(self._file, _SIZE)

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
        """The process that may be paused; 0 if there is none."""
        return int(_PID.unpack_from(self.memory, _PID_AT)[0])

    @pid.setter
    def pid(self, pid: int) -> None:
        _PID.pack_into(self.memory, _PID_AT, pid)


class Pausable:
    """The adaptation process, which may be paused while it computes. Without a `path` it never is."""

    def __init__(self, path: Path | None) -> None:
        self._shared = _Shared(path) if path is not None and can_pause() else None
        if self._shared is not None:
            if self._shared.lock(_PID_AT):
                self._shared.pid = 0  # of one that was killed
            else:
                self._shared = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside the context, this process may be paused."""
        if self._shared is None:
            yield
            return
        self._shared.pid = os.getpid()
        try:
            yield
        finally:
            self._shared.pid = 0


class Pausing:
    """Pauses the adaptation process; a `with` block for each request, on the event loop.

    It is paused while the requests of all processes are half as many as `cores` or more, because two of what
    the system calls cores often are one. A pause lasts at most 0.2 s; then it runs for 20 ms or longer.
    Without a `path` nothing is paused.
    """

    def __init__(self, path: Path | None, cores: int) -> None:
        self._cores = cores
        self._requests = 0
        self._paused = False  # by this process, and not let run since
        self._handle: int | None = None  # of the other process; never that of one with the same number
        self._handled_pid = 0
        self._timer: asyncio.TimerHandle | None = None
        self._shared = _Shared(path) if path is not None and can_pause() else None
        self._own = self._place() if self._shared is not None else 0
        if self._own:
            self._count()
            self._run()  # the process that was here before may have been killed during a pause
        else:
            self._shared = None

    def __enter__(self) -> None:
        self._requests += 1
        if self._shared is not None:
            self._count()
            self._look()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests -= 1
        if self._shared is not None:
            self._count()
            self._look()

    # ----------------------------------------------------------------------------------------------------

    def _place(self) -> int:
        """The byte of this process; 0 if all are taken."""
        if self._shared is None:
            return 0
        places = range(_COUNTS_AT, _COUNTS_AT + _PROCESSES)
        return next((at for at in places if self._shared.lock(at)), 0)

    def _count(self) -> None:
        if self._shared is not None:
            self._shared.memory[self._own] = min(self._requests, _MOST)

    def _look(self) -> None:
        """Pause the other process, or let it run."""
        if self._shared is None or not (self._shared.pid or self._paused):
            return
        since_s, until_s = _TIMES.unpack_from(self._shared.memory, _TIMES_AT)
        now_s = time.monotonic()
        if not (self._shared.pid and self._busy()):
            if self._paused or since_s:
                self._run()
        elif since_s and now_s - since_s >= _LONGEST_S:
            self._run(now_s + _LEAST_RUN_S)
        elif now_s >= until_s:
            self._pause(since_s or now_s)

    def _busy(self) -> bool:
        if self._shared is None:
            return False
        return 2 * sum(self._shared.memory[_COUNTS_AT:_SIZE]) >= self._cores

    def _pause(self, since_s: float) -> None:
        if self._shared is None or not self._send(signal.SIGSTOP):
            return
        self._paused = True
        _TIMES.pack_into(self._shared.memory, _TIMES_AT, since_s, 0.0)
        if self._timer is None:  # a request may take longer than a pause, and no other one come
            self._timer = asyncio.get_running_loop().call_later(_LONGEST_S + _TIMERS_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()

    def _run(self, until_s: float = 0.0) -> None:
        """Let the other process run, at least until then."""
        self._paused = False
        if self._shared is not None and self._send(signal.SIGCONT):
            _TIMES.pack_into(self._shared.memory, _TIMES_AT, 0.0, until_s)

    def _send(self, number: signal.Signals) -> bool:
        """Send a signal to the other process; False if there is none."""
        try:
            if self._handle is None or self._shared_pid() not in (0, self._handled_pid):
                self._open()
            if self._handle is None:
                return False
            signal.pidfd_send_signal(self._handle, number)
        except ProcessLookupError:
            self._forget()
            return False
        except OSError as error:  # forbidden by some sandboxes
            _log.info("retraining is not paused while requests are answered", extra={"reason": str(error)})
            self._forget()
            self._shared = None
            return False
        return True

    def _shared_pid(self) -> int:
        return 0 if self._shared is None else self._shared.pid

    def _open(self) -> None:
        """Open a handle of the process that may be paused now, if there is one."""
        self._forget()
        if self._shared is None or not (pid := self._shared.pid):
            return
        self._handle, self._handled_pid = os.pidfd_open(pid), pid
        if self._shared.lock(_PID_AT):  # it has ended, and another one may have its number
            self._shared.pid = 0
            self._shared.unlock(_PID_AT)
            self._forget()

    def _forget(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self._handle, self._handled_pid = None, 0
