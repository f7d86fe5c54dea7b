"""Locks of files that only one process at a time may write."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import IO

KEPT = "another process keeps it"


def hold(path: Path) -> IO[bytes] | str:
    """Take the lock, which ends with the process however that ends; returns why if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("ab")
    except OSError as error:
        return f"cannot write {path.parent} ({error.strerror or error})"
    with suppress(ImportError):  # a system without it has no lock, and no second process if used rightly
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            return KEPT
    return handle
