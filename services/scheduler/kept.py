"""Remembers the versions of a model that were loaded over REST, and loads them again after a restart.

They are loaded again when the inference process restarts and when the scheduler restarts. They are stored in
`NAME.versions.json` in the folder of the model's state, which only one server at a time may write. The file
is written atomically, and only after a change. A damaged file is logged and ignored, so that the server still
starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from gati.documents import DocumentKind
from gati.errors import StorageError
from gati.types import is_name
from services.locks import hold, is_in_place
from services.states import BASE_VERSION

_log = logging.getLogger("gati.scheduler")

_LARGEST_BYTES = 2**20
_MOST_ATTEMPTS = 3  # in a row, to load a version that crashes or hangs the process, or is refused
_DOCUMENT = DocumentKind(1, StorageError, "delete it, and load the versions again")


@dataclass(frozen=True)
class _Kept:
    versions: dict[str, str | None] = field(default_factory=dict)  # version: composition, None for no caches
    answering: tuple[str, ...] = ()  # of these: the active version, then the pending one
    seen: frozenset[str] = frozenset()  # all versions that were loaded, also those not loaded over REST


class KeptVersions:
    """The versions loaded over REST, and which of them are active and pending.

    Kept only in memory if there is no `folder` or another server holds its lock.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / f"{name}.versions.json"
        self._lock: IO[bytes] | None = None
        self._why_not = "the model has no folder for its state; set it with `state`"
        self._now = _Kept()
        self._written = _Kept()
        self._writing = asyncio.Lock()
        self._attempts: Counter[tuple[int, str]] = Counter()  # by replica and version
        self._left_out: dict[int, set[str]] = {}  # by replica: versions that it has to load later
        self._begun: frozenset[str] = frozenset()
        self.changes = 0  # counts loads; a replica that is catching up checks whether one happened meanwhile

    def open(self) -> None:
        """Lock and read the file. Call before anything is loaded."""
        if self._path is None or self._lock is not None:
            return
        lock = hold(self._path.with_suffix(".lock"))
        if isinstance(lock, str):
            self._why_not = lock
            return
        self._lock = lock
        if self._now.versions:  # those in memory are newer
            return
        try:
            self._now = self._written = _read(self._path)
        except StorageError as error:
            _log.error(
                "versions from before the restart cannot be loaded again", extra={"reason": str(error)}
            )

    def close(self) -> None:
        """Release the lock on the file."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def in_turn(self) -> list[tuple[str, str | None]]:
        """Versions with their compositions: first the active one, then the pending one, then the others."""
        order = {name: place for place, name in enumerate(self._now.answering)}
        return sorted(self._now.versions.items(), key=lambda item: order.get(item[0], len(order)))

    def began(self, found: Iterable[Any]) -> tuple[str, ...]:
        """The versions to activate again in a service that has started with the versions `found` on the wire.

        Empty if the service has started with an active or pending version that was not known before: that
        choice is newer.
        """
        self._begun = frozenset(each.version for each in found if each.active or each.pending)
        return self._now.answering if self._begun <= self._now.seen else ()

    def answers(self, version: str) -> bool:
        """Whether that version is the active or the pending one."""
        return version in self._now.answering

    def loaded(self, version: str, composition: str | None) -> None:
        """Remember a version; the next call of `told` saves it."""
        self.forget(version)
        self._now = replace(self._now, versions={**self._now.versions, version: composition})
        self.changes += 1

    def forget(self, version: str) -> None:
        """Forget a version; the next call of `told` saves that."""
        left = {name: of for name, of in self._now.versions.items() if name != version}
        answering = tuple(name for name in self._now.answering if name != version)
        self._now = replace(self._now, versions=left, answering=answering)
        for key in [key for key in self._attempts if key[1] == version]:
            del self._attempts[key]
        for left_out in self._left_out.values():
            left_out.discard(version)

    def failed(self, version: str, replica: int) -> bool:
        """Count a crash or hang of a replica while it loaded a version again.

        Returns True if the version is now forgotten: this replica has failed too often in a row.
        """
        self._attempts[replica, version] += 1
        if self._attempts[replica, version] < _MOST_ATTEMPTS:
            return False
        self.forget(version)
        return True

    def refused(self, version: str, replica: int) -> bool:
        """Count that a replica refused to load a version again, for example because the disk is full.

        Returns True if that has happened too often in a row: then the replica should serve without it.
        """
        self._attempts[replica, version] += 1
        return self.lacks(replica, version) or self._attempts[replica, version] >= _MOST_ATTEMPTS

    def leave_out(self, replica: int, versions: set[str]) -> None:
        """Remember which versions a replica has to load later; until then they are not forgotten."""
        self._left_out[replica] = versions

    def lacks(self, replica: int, version: str | None = None) -> bool:
        """Whether a replica has to load that version, or any, later."""
        left_out = self._left_out.get(replica, ())
        return bool(left_out) if version is None else version in left_out

    def caught_up(self, replica: int) -> None:
        """Forget the failures of a replica that now has all versions that it can have."""
        for key in [key for key in self._attempts if key[0] == replica]:
            del self._attempts[key]

    async def told(self, found: Iterable[Any]) -> None:
        """Update from the versions `found` on the wire, and save the file if anything changed."""
        found = list(found)
        names = {each.version for each in found}
        left_out = set[str]().union(*self._left_out.values()) - names
        for gone in self._now.versions.keys() - names - left_out:
            self.forget(gone)
        in_order = [each.version for each in found if each.active]
        in_order += [each.version for each in found if each.pending]
        answering = tuple(name for name in in_order if name in self._now.versions)
        before = self._now.answering
        if not left_out.isdisjoint(before) and self._begun.union(before).issuperset(in_order):
            answering = before  # nothing was chosen since in place of what is left out
        self._now = replace(self._now, answering=answering, seen=self._begun | names)
        async with self._writing:
            await self._write()

    async def _write(self) -> None:
        now, before = self._now, self._written
        if now == before or not (now.versions or before.versions):
            return
        self._written = now  # even if it is not saved: the next change tries again
        path, lock = self._path, self._lock
        if path is None or lock is None or not is_in_place(lock, path.with_suffix(".lock")):
            if now.versions != before.versions:
                reason = self._why_not if lock is None else "its folder is gone"
                extra = {"versions": list(now.versions), "reason": reason}
                _log.warning("versions loaded over REST will be lost when this server stops", extra=extra)
            return
        try:
            await asyncio.to_thread(_DOCUMENT.write, path, _values(now))
        except StorageError as error:
            self._written = before
            _log.error("the loaded versions could not be saved", extra={"reason": str(error)})


def is_loaded(found: Any, version: str, composition: str | None) -> bool:
    """Whether `found`, the loaded version of that name if any, has that composition (None: no caches).

    A name may be used again for another composition. If the service does not report it, the name decides.
    """
    if found is None:
        return False
    if found.source is None:
        return version == (composition or BASE_VERSION)
    return found.source.folder is None and found.source.composition == composition


def _values(kept: _Kept) -> dict[str, Any]:
    rows = [{"version": name, "composition": of} for name, of in kept.versions.items()]
    return {"versions": rows, "answering": list(kept.answering), "seen": sorted(kept.seen)}


def _read(path: Path) -> _Kept:
    """Read the file. Raises `StorageError` if it is damaged or much too large."""
    if not path.exists():
        return _Kept()
    with _DOCUMENT.reading(str(path)):
        if path.stat().st_size > _LARGEST_BYTES:
            raise ValueError(f"more than {_LARGEST_BYTES} bytes")
    document = _DOCUMENT.read(path)
    with _DOCUMENT.reading(str(path)):
        versions = {_name(row["version"]): _composition(row["composition"]) for row in document["versions"]}
        answering = tuple(_name(each) for each in document["answering"] if each in versions)
        return _Kept(versions, answering, frozenset(map(_name, document["seen"])))


def _name(value: Any) -> str:
    if not isinstance(value, str) or not is_name(value):
        raise ValueError(f"{value!r} is not a valid name")
    return value


def _composition(value: Any) -> str | None:
    return None if value is None else _name(value)
