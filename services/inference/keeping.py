"""The standing of a served model's versions, in a file that outlives the process.

The file is `STATE/NAME.json`, by default in the library's folder `standing`; further replicas have
`NAME@1.json` and so on, with proofs of their own and a share of the error that all may make. A process that
cannot write it, or finds it locked by another, reads it, keeps changes in memory and logs a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gati.guard.standing import Snapshot, Standing
from gati.guard.watch import OnEvent, Watch
from services.inference.settings import InferenceSettings
from services.locks import hold

__all__ = ["ServedStanding", "open_standing"]

_log = logging.getLogger("gati.inference")

_DELTA = 0.05  # scaled to each version's


class ServedStanding(Standing):
    """A `Standing` whose evidence is written by a thread of its own.

    Changes of state are still written before they take effect. Versions with equal caches share a watch.
    """

    def __init__(self, path: Path | None, *, writable: bool = True, replicas: int = 1) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gati-standing")
        self._writable = writable
        self._shared: dict[str, Watch] = {}
        self._listeners: dict[str, OnEvent] = {}
        super().__init__(_DELTA / replicas, path)

    @property
    def path(self) -> Path | None:
        """Where it is written; None if another process owns the file."""
        return super().path if self._writable else None

    def of(
        self,
        identity: str,
        agreement: float,
        *,
        proven: bool,
        delta: float,
        on_event: OnEvent,
        settings: int = 1,
    ) -> Watch:
        """The watch of a version, shared by versions with equal caches and promise."""
        self._listeners[identity] = on_event
        known = self._shared.get(identity)
        if known is None or known.agreement != agreement or known.settings != settings:
            known = self._shared[identity] = self.watch(
                identity,
                agreement,
                proven=proven,
                settings=settings,
                delta=delta,
                on_event=lambda event: self._listeners[identity](event),
            )
        return known

    def audited(self) -> None:
        """Write evidence soon, without waiting for the disk, after a watch took in an audit."""
        snapshot = super().audited()
        if snapshot is not None:
            self._thread.submit(self.write, snapshot)

    def write(self, snapshot: Snapshot) -> None:
        """As `Standing.write`, if this process owns the file."""
        if self._writable:
            super().write(snapshot)

    def close(self) -> None:
        """Write everything, and stop the thread."""
        self.save()
        self._thread.shutdown()


def open_standing(settings: InferenceSettings) -> tuple[ServedStanding, Callable[[], None]]:
    """Open the standing of a model's versions; returns it with a function that releases its file.

    It is kept in memory if the file cannot be written.
    """
    folder = settings.state_folder
    if folder is None:
        return ServedStanding(None, replicas=settings.replicas), _nothing
    path = folder / f"{settings.label}.json"
    lock = hold(path.with_suffix(".lock"))
    if isinstance(lock, str):
        _log.warning(
            "how versions stand is kept in memory only; name a folder with `state`",
            extra={"file": str(path), "reason": lock},
        )
        return ServedStanding(path, writable=False, replicas=settings.replicas), _nothing
    return ServedStanding(path, replicas=settings.replicas), lock.close


def _nothing() -> None:
    """There is no file to release."""
