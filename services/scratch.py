"""Temporary folders that are removed even if the process that created them is killed.

The process holds a lock in its folder; the system releases it however the process ends. Whoever creates the
next folder of the same kind removes those whose lock is free.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

_log = logging.getLogger("gati.scratch")

_LOCK = "lock"
_YOUNG_S = 60.0  # a folder without a lock may be about to get one


class Scratch:
    """A folder that only this user may enter; `close` removes it."""

    def __init__(self, kind: str) -> None:
        prefix = f"gati-{kind}-"
        _sweep(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = (self.path / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if _is_left(folder):
            _log.info("removed the temporary folder of a dead process", extra={"folder": str(folder)})
            shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Whether a folder is one of ours whose process has ended."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return _age_s(folder) > _YOUNG_S
    except OSError:  # locked by its process, or not readable
        return False


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0
