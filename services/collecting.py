"""Python's garbage collector, kept out of where it would hold up everything else."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["keep_for_good", "uncollected"]

_lock = threading.Lock()
_inside = 0  # blocks that run now
_was_enabled = False


def keep_for_good() -> None:
    """What is there now stays: no collection looks through it again."""
    gc.collect()
    gc.freeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected until the block ends, in any thread.

    For a block that makes many lists or dicts and lets go of them again: while they grow in number, all of
    them are looked through time after time, and no other thread runs meanwhile.
    """
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()
