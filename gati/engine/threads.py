"""How many threads torch uses in each thread of this process, and their priority."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_CHANGES = threading.Lock()


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


def one_thread() -> AbstractContextManager[None]:
    """As `on_threads`, on a single one."""
    return on_threads(1)


def usable_cores() -> set[int]:
    """The cores that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def let_others_first(niceness: int) -> None:
    """Lower the priority of the calling thread, if the system has priorities per thread."""
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def work_alongside(niceness: int) -> None:
    """Let the calling thread work next to others: with one torch thread, and at a lower priority."""
    limit_threads(1)
    let_others_first(niceness)
