"""Keeps Python's garbage collector from delaying requests."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST_S = 10.0  # longest time without a collection

_lock = threading.Lock()
_inside = 0  # number of `uncollected` blocks that are running
_was_enabled = False
_collected_s = 0.0


def keep_for_good() -> None:
    """Exclude all existing objects from later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage until the block ends, in any thread.

    For a block that creates many lists or dicts and drops them again: the collector would scan all of them
    repeatedly while no other thread can run. If blocks overlap without a gap, garbage is collected at the end
    of a block once `_LONGEST_S` have passed.
    """
    global _inside, _was_enabled, _collected_s
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
            _collected_s = time.monotonic()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            is_due = _inside > 0 and _was_enabled and time.monotonic() - _collected_s >= _LONGEST_S
            if is_due:
                _collected_s = time.monotonic()
            if not _inside and _was_enabled:
                gc.enable()
        if is_due:
            gc.collect()
