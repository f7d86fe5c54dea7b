"""Temporary folders that are removed even if the process that created them is killed.

The process holds a lock in its folder; the system releases it however the process ends. Whoever creates the
next folder of the same kind removes those whose lock is free, and holds that lock meanwhile. The folder
itself is locked as well: `systemd-tmpfiles`, which removes old files from /tmp, leaves alone what is in a
locked folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from gati.errors import StorageError

_log = logging.getLogger("gati.scratch")

_LOCK = "lock"
_YOUNG_S = 60.0  # a folder without a lock may be about to get one


class Scratch:
    """A folder that only this user may enter; `close` removes it."""

    def __init__(self, kind: str) -> None:
        """Raises `StorageError` if there is no place for it."""
        try:
            self._make(f"gati-{kind}-")
        except OSError as error:
            raise StorageError(
                f"no temporary folder can be made ({error.strerror or error}); set TMPDIR to a folder with "
                "free space that can be written"
            ) from error

    def _make(self, prefix: str) -> None:
        _sweep(prefix)
        lock = None
        while lock is None:  # another process may remove a folder that is not locked yet
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            lock = _locked(self.path)
        self._held = ExitStack()
        self._held.callback(lock.close)
        folder = os.open(self.path, os.O_RDONLY)
        self._held.callback(os.close, folder)
        with suppress(OSError):  # network file systems may not lock folders
            fcntl.flock(folder, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder and everything in it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()


def _locked(folder: Path) -> IO[bytes] | None:
    """The lock of a new folder; None if the folder was removed before it was locked."""
    try:
        lock = (folder / _LOCK).open("wb")
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_EX)  # waits for who removes the folder
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock.fileno()), (folder / _LOCK).stat()):
            return lock
    lock.close()
    return None


def _sweep(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if _removed(folder):
            _log.info("removed the temporary folder of a dead process", extra={"folder": str(folder)})


def _removed(folder: Path) -> bool:
    """Remove a folder if it is one of ours whose process has ended; returns whether it was."""
    lock = folder / _LOCK
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        if not lock.exists() and time.time() - folder.stat().st_mtime <= _YOUNG_S:
            return False
        with lock.open("ab") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # locked by its process, removed by another one, or not readable
        return False
    return True
