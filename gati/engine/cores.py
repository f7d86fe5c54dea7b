"""Cores that overlapped lookups reserve on the CPU, and what is left of them to the thread that asks."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch

from gati.cores import usable_cores, within_quota
from gati.errors import BackendError


class PartOfCores(NamedTuple):
    """A part of the cores, and how many threads may compute on it at a time."""

    cores: set[int]
    threads: int


class ReservedCores:
    """What overlapped lookups reserve of the cores of one thread, and what it had before."""

    def __init__(self) -> None:
        self._shares: dict[object, int] = {}  # numbers of cores, by who asks for them
        self._thread = threading.current_thread()
        self._cores: set[int] = set()
        self._threads = self._left = 0  # of torch: before, and while cores are reserved
        self._owed = False  # another thread has released, but each can only set its own number of threads
        self._gone: deque[object] = deque()  # who asks for no cores any more, but still has a share
        self._changes = threading.Lock()
        self._changing = 0  # the thread that has the lock

    @property
    def cores(self) -> set[int]:
        """Those that the thread had before, or has now if none are reserved; only it may ask."""
        return self._cores if self._shares else usable_cores()

    def add(self, lookups: object, share: int) -> None:
        """Confine the calling thread, whose this is, to the cores that `lookups`, too, leave it."""
        with self._change():
            if not self._shares:
                self._settle()
                self._cores, self._threads = usable_cores(), torch.get_num_threads()
            self._shares[lookups] = share
            self._confine()

    def remove(self, lookups: object) -> None:
        """Give back what only `lookups` reserved; in another thread, all but torch threads.

        Never waits: lookups may be collected in the middle of a change, which then gives back at its end.
        """
        self._gone.append(lookups)
        self._remove_gone()

    def settle(self) -> None:
        """Give the calling thread, whose this is, the torch threads that another one could not give back."""
        if self._changing == threading.get_ident():
            return  # collected in the middle of a change, which gives back at its end
        with self._change():
            self._drain()
            self._settle()

    def confine(self) -> None:
        """Leave the lookups the largest of their shares; torch uses at most one thread per other core."""
        with self._change():
            self._confine()

    def release(self) -> None:
        """Restore cores and torch threads."""
        with self._change():
            self._release()

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._changes:
            self._changing = threading.get_ident()
            try:
                yield
            finally:
                self._changing = 0
        self._remove_gone()

    def _remove_gone(self) -> None:
        while self._gone and self._changes.acquire(blocking=False):  # else who changes does it at the end
            self._changing = threading.get_ident()
            try:
                self._drain()
            finally:
                self._changing = 0
                self._changes.release()

    def _drain(self) -> None:
        while self._gone:
            self._remove(self._gone.popleft())

    def _remove(self, lookups: object) -> None:
        if self._shares.pop(lookups, None) is None:
            return
        if self._thread is not threading.current_thread():
            self._owed = True
            if self._thread.is_alive():
                pin(self._left_over().cores, self._thread.native_id or 0)
        elif self._shares:
            self._confine()
        else:
            self._release()

    def _confine(self) -> None:
        left, most = self._left_over()
        pin(left)
        self._left = min(self._threads, most)
        torch.set_num_threads(self._left)

    def _release(self) -> None:
        pin(self._cores)
        torch.set_num_threads(self._threads)

    def _left_over(self) -> PartOfCores:
        if not self._shares:
            return PartOfCores(self._cores, self._threads)
        return divided(self._cores, max(self._shares.values()))[0]

    def _settle(self) -> None:
        owed, self._owed = self._owed, False
        if owed and self._shares:
            self._confine()
        elif owed and torch.get_num_threads() == self._left:  # and not another number that was set since
            torch.set_num_threads(self._threads)


class _Here(threading.local):
    def __init__(self) -> None:
        self.reserved = ReservedCores()


_here = _Here()


def _begin_anew() -> None:
    # A forked process has no workers, so nothing is reserved there, and no other thread has the lock.
    if _here.reserved._shares:
        pin(_here.reserved._cores)
    _here.reserved = ReservedCores()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def reserved_here() -> ReservedCores:
    """What is reserved of the calling thread's cores."""
    return _here.reserved


def check_lookup_cores(count: int, device: torch.device) -> None:
    """Raise BackendError for a number of cores that overlapped lookups cannot have on `device`."""
    if count < 1:
        raise BackendError(f"lookup_cores is {count}; give at least 1")
    if count > 1 and device.type != "cpu":
        raise BackendError(
            f"lookup_cores is {count}, but on {device} lookups run on a stream, not on cores: leave it out"
        )
    if count > (most := most_lookup_cores()):
        usable = within_quota(len(reserved_here().cores))
        raise BackendError(
            f"lookup_cores is {count}, but of the usable cores ({usable}) the network needs at least one: "
            f"give at most {most}"
        )


def most_lookup_cores() -> int:
    """How many cores overlapped lookups can have: all but one of those that are usable, at least one.

    What is open in this thread already reserves none of them: lookups share cores.
    """
    return max(1, within_quota(len(reserved_here().cores)) - 1)


def divided(cores: set[int], wanted: int) -> tuple[PartOfCores, PartOfCores]:
    """The part of the calling thread, and that of lookups, which have the last cores.

    Each has at least one thread. Where a quota grants the time of fewer cores, both may run on all of them:
    the last ones are also those of the lookups in other containers of this machine.
    """
    count = within_quota(len(cores))
    theirs = min(wanted, max(1, count - 1))
    ours = max(1, count - theirs)
    if len(cores) == 1 or count < len(cores):
        return PartOfCores(cores, ours), PartOfCores(cores, theirs)
    ordered = sorted(cores)
    return PartOfCores(set(ordered[:ours]), ours), PartOfCores(set(ordered[ours:]), theirs)


def pin(cores: set[int], thread: int = 0) -> None:
    """Pin the calling thread, or that with another native id, if the system supports and permits it."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(thread, cores)
