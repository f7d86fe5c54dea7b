"""How the versions of a served model stand, in a file that outlives the process.

`STATE/NAME.json`, in the folder `standing` of the library unless the settings name another. Who cannot write
there, or finds another process at it, reads what is there and keeps what follows in memory: said in one line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from gati.adapt.standing import Standing
from gati.adapt.watch import OnEvent, Watch
from gati.errors import StorageError
from gati.files import atomic_write_text
from services.inference.settings import InferenceSettings

__all__ = ["Ledger", "open_ledger"]

_log = logging.getLogger("gati.inference")

_DELTA = 0.05  # shares are scaled to that of each version
_SAVED_EVERY_S = 1.0


class Ledger(Standing):
    """A `Standing` whose evidence is written by a thread of its own, and whose disk may fail.

    A change of state is still written before anybody acts on it. Versions of the same caches share a watch.
    """

    def __init__(self, path: Path | None, *, writable: bool = True) -> None:
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gati-standing")
        self._writable = writable
        self._number = self._written = 0
        self._failing = False
        self._shared: dict[str, Watch] = {}
        self._listeners: dict[str, OnEvent] = {}
        super().__init__(_DELTA, path)

    def of(
        self, identity: str, agreement: float, *, proven: bool, delta: float, on_event: OnEvent
    ) -> Watch:
        """The watch of a version; the same one for versions with the same caches and promise."""
        self._listeners[identity] = on_event
        known = self._shared.get(identity)
        if known is None or known.agreement != agreement:
            known = self._shared[identity] = self.watch(
                identity,
                agreement,
                proven=proven,
                delta=delta,
                on_event=lambda event: self._listeners[identity](event),
            )
        return known

    def audited(self) -> None:
        """Some watch has taken in an audit: write it down soon, without waiting for the disk."""
        if self._clock() - self._saved_s >= _SAVED_EVERY_S:
            self._saved_s = self._clock()
            self._thread.submit(self._write, *self._numbered())

    def save(self) -> None:
        """Write everything down now. What fails is said, and tried again with the next audit."""
        self._saved_s = self._clock()
        self._write(*self._numbered())

    def close(self) -> None:
        """Write everything down, and end."""
        self.save()
        self._thread.shutdown()

    def _numbered(self) -> tuple[int, str]:
        self._number += 1
        return self._number, self._text()

    def _write(self, number: int, text: str) -> None:
        with self._lock:
            if self._path is None or not self._writable or number <= self._written:
                return
            try:
                atomic_write_text(self._path, text)
            except StorageError as error:
                if not self._failing:
                    _log.error("how versions stand cannot be kept", extra={"reason": str(error)})
                self._failing = True
                return
            self._written, self._failing = number, False


def open_ledger(settings: InferenceSettings) -> tuple[Ledger, Callable[[], None]]:
    """The ledger of a model, and what gives its file back. One that cannot be written is kept in memory."""
    folder = settings.state
    if folder is None:
        if settings.library is None:
            return Ledger(None), _nothing
        folder = settings.library / "standing"
    path = folder / f"{settings.name}.json"
    lock = _locked(path.with_suffix(".lock"))
    if isinstance(lock, str):
        _log.warning(
            "how versions stand is kept in memory only; name a folder with `state`",
            extra={"file": str(path), "reason": lock},
        )
        return Ledger(path, writable=False), _nothing
    return Ledger(path), lock.close


def _nothing() -> None:
    """There is no file to give back."""


def _locked(path: Path) -> IO[bytes] | str:
    """The lock, which ends with its process however that ends, or why it cannot be had."""
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
            return "another process keeps it"
    return handle
