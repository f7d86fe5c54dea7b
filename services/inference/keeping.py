"""How the versions of a served model stand, in a file that outlives the process.

`STATE/NAME.json`, in the folder `standing` of the library unless the settings name another; `NAME@1.json` and
so on of further replicas, each of which has proofs of its own and a part of the error that all of them may
make. Who cannot write there, or finds another process at it, reads what is there and keeps what follows in
memory: said in one line.
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

_DELTA = 0.05  # shares are scaled to that of each version


class ServedStanding(Standing):
    """A `Standing` whose evidence is written by a thread of its own.

    A change of state is still written before anybody acts on it. Versions of the same caches share a watch.
    """

    def __init__(self, path: Path | None, *, writable: bool = True, replicas: int = 1) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gati-standing")
        self._writable = writable
        self._shared: dict[str, Watch] = {}
        self._listeners: dict[str, OnEvent] = {}
        super().__init__(_DELTA / replicas, path)

    @property
    def path(self) -> Path | None:
        """Where it is written; None where the file is another process's."""
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
        """The watch of a version; the same one for versions with the same caches and promise."""
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
        """Some watch has taken in an audit: write it down soon, without waiting for the disk."""
        snapshot = super().audited()
        if snapshot is not None:
            self._thread.submit(self.write, snapshot)

    def write(self, snapshot: Snapshot) -> None:
        """As `Standing.write`, where the file is this process's to write."""
        if self._writable:
            super().write(snapshot)

    def close(self) -> None:
        """Write everything down, and end."""
        self.save()
        self._thread.shutdown()


def open_standing(settings: InferenceSettings) -> tuple[ServedStanding, Callable[[], None]]:
    """How the versions of a model stand, and what gives its file back.

    Where it cannot be written it is kept in memory.
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
    """There is no file to give back."""
