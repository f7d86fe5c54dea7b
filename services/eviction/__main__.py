"""Fit predictors to access logs: `python -m services.eviction SETTINGS`, with its settings as JSON.

`gati evict serve` starts it at low priority. If it is killed, nothing is lost: accesses are in the logs,
and versions in the repository.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO

from gati.errors import StorageError
from gati.evict.learn.fitting import VersionFitter
from gati.evict.learn.folder import access_of, lock_of, status_of
from gati.evict.learn.reading import AccessReader
from gati.evict.predict.hazard import lightgbm_module
from gati.evict.predict.reuse import ReuseSettings
from gati.files import atomic_write_text
from gati.priority import give_way
from services.again import keep_on
from services.eviction.settings import FitterSettings
from services.process import ended, run

_log = logging.getLogger("gati.eviction")

_LONGEST_PAUSE_S = 30.0
_TELL_EVERY_S = 1.0  # between writes of the status, while many entries are read


def main() -> int:
    """Fit with the settings from the command line; returns the exit status."""
    return run(FitterSettings, lambda settings: "fitter", _fit)


class _Fitting:
    """The fitter, its input, and the status file of both. Call `look` from one thread at a time."""

    def __init__(self, settings: FitterSettings) -> None:
        self._settings = settings
        self._reader = AccessReader(access_of(settings.folder))
        own = ReuseSettings(first_fit=settings.first_fit, longest_step=settings.step)
        self._fitter = VersionFitter(settings.folder, own, trial_capacities=settings.trial_capacities)
        self._stopped = threading.Event()
        self._told = ""
        self._tell_s = 0.0

    def look(self) -> None:
        """Read new log entries and learn from them. Raises StorageError if a version is still not stored."""
        for record in self._reader.read():
            if self._stopped.is_set():
                return
            self._fitter.take(record)
            if time.monotonic() >= self._tell_s:
                self._tell()
        self._reader.sweep(self._settings.log_bytes)
        self._tell()
        self._fitter.publish_waiting()

    def stop(self) -> None:
        """Make `look` return soon."""
        self._stopped.set()

    def _tell(self) -> None:
        found = {**self._fitter.status(), "damaged": self._reader.damaged, "lost": self._reader.lost}
        text = json.dumps(found, indent=1)
        if text != self._told:
            try:
                atomic_write_text(status_of(self._settings.folder), text + "\n")
                self._told = text
            except StorageError as error:  # continue: some entries are read but not learned from yet
                _log.warning("cannot write the status file; it is out of date", extra={"reason": str(error)})
        self._tell_s = time.monotonic() + _TELL_EVERY_S


async def _fit(settings: FitterSettings) -> None:
    give_way(settings.niceness)
    stopped = asyncio.create_task(ended(with_stdin=settings.end_with_stdin))
    lightgbm_module()
    alone = asyncio.create_task(asyncio.to_thread(_alone, settings.folder))
    await asyncio.wait((stopped, alone), return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        os._exit(0)  # do not wait for the other service
    with alone.result():
        fitting = await asyncio.to_thread(_Fitting, settings)
        _log.info("ready")
        looking = asyncio.create_task(
            keep_on(
                "fitting",
                lambda: asyncio.to_thread(fitting.look),
                every_s=settings.look_every_s,
                longest_s=_LONGEST_PAUSE_S,
            )
        )
        await asyncio.wait((stopped, looking), return_when=asyncio.FIRST_COMPLETED)
        fitting.stop()
        os._exit(0)  # do not wait for a fit in progress: it stores nothing before publication


def _alone(folder: Path) -> IO[bytes]:
    """The lock of a folder, once no other service holds it; it is held until this process ends."""
    path = lock_of(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("ab")
    except OSError as error:
        raise StorageError(f"cannot lock {path} ({error.strerror}); choose another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.warning("another service fits predictors in this folder; this one waits until it ends")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:  # such as a file system without locks
        reason = f"cannot lock {path} ({error.strerror})"
        _log.warning("start no other service in this folder: no lock stops it", extra={"reason": reason})
    return lock


if __name__ == "__main__":
    sys.exit(main())
