"""Locks for files that only one process at a time may write."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import IO

KEPT = "another process uses it"


def hold(path: Path) -> IO[bytes] | str:
    """Take the lock at `path`, which the system releases when the process ends, also if it is killed.

    Returns the open lock file, or a reason if that failed: `KEPT` if another process has it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("ab")
    except OSError as error:
        return f"cannot write {path.parent} ({error.strerror or error})"
    if refused := _refused(handle, path):
        handle.close()
        return refused
    return handle


def is_held(path: Path) -> bool:
    """Whether another process has the lock at `path`. It is taken for a moment to know that."""
    try:
        with path.open("r+b") as handle:
            return _refused(handle, path) == KEPT
    except OSError:  # no process has ever had it
        return False


def is_in_place(held: IO[bytes], path: Path) -> bool:
    """Whether the lock that is held is still the file at `path`, or may be made again in its folder.

    What is moved to the place of a removed library must neither end up inside nor lose its own state.
    """
    try:
        return os.path.samestat(os.fstat(held.fileno()), os.stat(path))
    except OSError:
        return os.path.isdir(path.parent.parent)


def _refused(handle: IO[bytes], path: Path) -> str:
    """Lock an open file until it is closed; returns why that failed."""
    with suppress(ImportError):  # without fcntl there is no lock: users must start only one process
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return KEPT
        except OSError as error:  # such as a file system without locks
            return f"cannot lock {path} ({error.strerror or error})"
    return ""
