"""The priority of processes that work in the background."""

from __future__ import annotations

import os
from contextlib import suppress


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
