"""How many threads torch uses in each thread of this process, and their priority."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from gati.cores import core_count, threads_are_given, usable_cores, within_quota

_CHANGES = threading.Lock()
_TOPOLOGY = Path("/sys/devices/system/cpu")


def limit_threads(count: int) -> None:
    """Make torch use `count` threads for the operations of the calling thread, until it sets another number.

    `torch.set_num_threads` alone is not enough: before its first operation, a new thread takes the number
    that any thread has set last. Other threads keep theirs.
    """
    with _CHANGES:
        others = torch.get_num_threads()  # a new thread takes the process's number here, not later
        torch.set_num_threads(count)
        if others != count:
            restoring = threading.Thread(target=torch.set_num_threads, args=(others,))
            restoring.start()
            restoring.join()


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Run torch on `count` threads inside the context, including graphs compiled there and new threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def granted_threads() -> int:
    """The number of threads that torch uses now, or fewer if this process may use the time of fewer cores.

    torch counts the cores of the whole machine, whatever the quota of a container. A number in
    OMP_NUM_THREADS holds.
    """
    count = torch.get_num_threads()
    return count if threads_are_given() else within_quota(count)


@contextmanager
def on_granted_threads() -> Iterator[None]:
    """As `on_threads`, on `granted_threads`; does nothing if torch uses no more.

    Setting the number again would change that of new threads: they take the one that any thread has set last.
    """
    granted = granted_threads()
    with on_threads(granted) if granted < torch.get_num_threads() else nullcontext():
        yield


def one_thread() -> AbstractContextManager[None]:
    """As `on_threads`, on a single one."""
    return on_threads(1)


def takes_every_core(count: int) -> bool:
    """Whether that many threads, more than one, keep every core of the machine busy, and may do so.

    Hardware threads that share a core count once: networks get no faster with two on a core.
    """
    if count < 2 or core_count() < (os.cpu_count() or 1):
        return False
    return count >= len({_siblings(core) for core in usable_cores()})


def _siblings(core: int) -> str:
    """The hardware threads on the same core, as the system lists them; only its own number if it does not."""
    listed = _TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list"
    try:
        return listed.read_text(encoding="ascii")
    except OSError:
        return str(core)


def let_others_first(niceness: int) -> None:
    """Lower the priority of the calling thread to `niceness`, if the system has priorities per thread.

    A lower one, as of a process that was started with `nice`, stays: few users may raise it.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may refuse it, and without it answers are the same
            if niceness > os.getpriority(os.PRIO_PROCESS, 0):
                os.setpriority(os.PRIO_PROCESS, 0, niceness)


def work_alongside(niceness: int) -> None:
    """Let the calling thread work next to others: with one torch thread, and at a lower priority."""
    limit_threads(1)
    let_others_first(niceness)
