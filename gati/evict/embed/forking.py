"""Locks in processes that fork: no other thread holds them at that moment, so they are free in the child.

Otherwise a child that is forked while another thread serves would wait for ever for that thread, which it
does not have, or find a cache that is half changed.
"""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar
from weakref import WeakSet

# in the order in which threads acquire them: of changes of a pool, of caches, of a pool's free pages
RESIZING, SERVING, TAKING = range(3)
_locks: tuple[WeakSet[Any], ...] = (WeakSet(), WeakSet(), WeakSet())
_forking = threading.Lock()
_held: list[Any] = []


_L = TypeVar("_L")


def free_in_children(lock: _L, kind: int) -> _L:
    """Return this lock; from now on, forks acquire it before, and release it in both processes after."""
    _locks[kind].add(lock)
    return lock


def _acquire() -> None:
    _forking.acquire()
    for locks in _locks:
        for lock in list(locks):
            lock.acquire()
            _held.append(lock)


def _release() -> None:
    while _held:
        _held.pop().release()
    _forking.release()


os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_release)
