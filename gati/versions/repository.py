"""The model repository: versions of deployed caches, which of them serves, and the way back.

    repository = ModelRepository("models")                  # a directory, or any fsspec URL
    number = repository.publish("cars", "deployed/", Lineage(base_checkpoint_sha256=...))
    repository.activate("cars", number)
    if repository.active_token("cars") != seen:             # servers ask this every second or so
        repository.fetch("cars", repository.active("cars"), "/tmp/cars-7")
    repository.rollback("cars")

A version is a composition with its caches' weights: plain files and a manifest with their sha256 and the
version's lineage. Publishing is atomic, even if a process is killed. An append-only history determines the
active version, so nothing is ever overwritten and servers need no lock.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gati.errors import AdaptError, RepositoryError, StorageError, UnknownVersionError
from gati.types import is_name
from gati.versions.history import Action, Activation, History
from gati.versions.lineage import Lineage, StoredFile, Version, check_file, check_name
from gati.versions.objects import Objects, connect
from gati.versions.places import MANIFEST, Directory, Place, folder_files, folder_of, numbers

_CHUNK = 2**20
_HISTORY = 500  # activations that collecting garbage leaves
_STALE_S = 3600.0
_MOST_ATTEMPTS = 20


class ModelRepository:
    """Versions of models in a directory, or under an fsspec URL such as `s3://bucket/models`.

    `filesystem` is an fsspec file system made elsewhere, for credentials of its own; `url` is then the path
    on it. Any number of processes may publish, activate and collect garbage at once.

    **Raises:** `AdaptError` for a URL of no known kind, or a missing package.
    """

    def __init__(
        self, url: str | Path, *, filesystem: Any = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._place: Place
        if filesystem is not None:
            self._place = Objects(filesystem, str(url))
        elif "://" in str(url) and not str(url).startswith("file://"):
            self._place = connect(str(url))
        else:
            self._place = Directory(Path(str(url).removeprefix("file://")))
        self._history = History(self._place, clock)

    def models(self) -> list[str]:
        """The models that have complete versions."""
        return [name for name in self._place.children("") if is_name(name) and self.versions(name)]

    def publish(self, model: str, files: Mapping[str, bytes] | str | Path, lineage: Lineage) -> int:
        """Store files (by name, or all of a local folder) as the next version; returns its number.

        The version does not serve before it is activated.

        Raises:
            AdaptError: a wrong name, no files, a link among them, or a lineage that is not JSON.
            StorageError: the place is full or not writable; nothing was published.
        """
        check_name(model)
        sources = folder_files(Path(files)) if isinstance(files, str | Path) else dict(files)
        if not sources:
            raise AdaptError(f"nothing to publish for {model}: there are no files")
        for name in sources:
            if any(parent in sources for parent in _parents(check_file(name))):
                raise AdaptError(f"{name} is inside a folder with the name of another file; rename one")
        created = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")

        def manifest(number: int, entries: Mapping[str, StoredFile]) -> bytes:
            if lineage.parent is not None and lineage.parent >= number:
                raise AdaptError(f"parent is {lineage.parent}, but {model} has only {number - 1} versions")
            return Version(model, number, created, lineage, dict(entries)).to_json()

        manifest(2**31, {})  # reject an invalid lineage before anything is copied
        return self._place.publish(model, sources, manifest)

    def versions(self, model: str) -> list[Version]:
        """The complete versions, rising: manifest intact, every file there with its size."""
        check_name(model)
        found = (
            self._complete(model, number) for number in numbers(self._place.children(f"{model}/versions"))
        )
        return [version for version in found if version is not None]

    def version(self, model: str, number: int) -> Version:
        """One complete version. Raises UnknownVersionError if there is none."""
        check_name(model)
        if (found := self._complete(model, number)) is None:
            raise UnknownVersionError(f"{model} has no complete version {number}; list its versions")
        return found

    def fetch(self, model: str, number: int, into: str | Path) -> Version:
        """Copy a version's files to the new folder `into`, each checked; there is all of it or nothing.

        Raises:
            UnknownVersionError: no such version.
            RepositoryError: a file is not what was published, or `into` exists with something in it.
            StorageError: the local disk is full or not writable.
        """
        version, target = self.version(model, number), Path(into)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(
                tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:40]}.", suffix=".part")
            )
            try:
                for name, entry in version.files.items():
                    self._fetch_file(version, name, entry, temporary / "files" / name)
                os.replace(temporary / "files", target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        except OSError as error:
            if target.is_dir() and any(target.iterdir()):
                raise RepositoryError(f"{target} is not empty; fetch into a new folder") from error
            raise StorageError(f"fetching into {target} failed: {error.strerror or error}") from error
        return version

    def active(self, model: str) -> int | None:
        """The version that serves; None if none was activated."""
        return self._history.active(check_name(model))

    def actives(self, model: str) -> dict[str, int]:
        """The version activated last for each `made_for`, the latest one first; see `activate`."""
        return self._history.actives(check_name(model))

    def active_token(self, model: str) -> str:
        """Changes whenever a version is activated or rolled back; costs one listing of one folder."""
        return self._history.token(check_name(model))

    def history(self, model: str) -> list[Activation]:
        """All activations and rollbacks that are remembered, oldest first."""
        return self._history.entries(check_name(model))

    def activate(self, model: str, number: int, made_for: str = "") -> None:
        """Make a version the active one. Raises UnknownVersionError if it does not exist.

        Where several share a model, `made_for` says for whom: each finds its own in `actives`.
        """
        self.version(model, number)
        if self.active(model) != number or (made_for and self.actives(model).get(made_for) != number):
            self._switch(model, number, "activate", made_for)

    def rollback(self, model: str) -> int:
        """Activate the previously active version and return it; repeated calls go back further.

        **Raises:** `RepositoryError` if there is none.
        """
        target = self._rollback_target(check_name(model))
        if target is None:
            raise RepositoryError(f"{model} has no earlier version to go back to; activate one")
        self._switch(model, target, "rollback")
        return target

    def pin(self, model: str, number: int) -> None:
        """Keep a version from being collected. Raises UnknownVersionError if there is none."""
        self.version(model, number)
        self._place.put(_pin(model, number), b"pinned\n")
        self._check_stays(model, number, _pin(model, number))

    def unpin(self, model: str, number: int) -> None:
        """Remove the pin, if there is one."""
        check_name(model)
        self._place.remove(_pin(model, number))

    def pinned(self, model: str) -> list[int]:
        """The pinned versions, in ascending order."""
        return numbers(self._place.children(f"{check_name(model)}/pins"))

    def collect_garbage(self, model: str, keep: int = 5, besides: Collection[int] = ()) -> list[int]:
        """Remove all but the newest `keep` versions, and what was left unfinished over an hour ago.

        Never removed: those in `besides`, the active versions, the one a rollback would go to, and those
        pinned. On an object store, what was left unfinished goes once there is a newer version. Returns what
        was removed.
        """
        if keep < 1:
            raise AdaptError(f"keep is {keep}, must be at least 1")
        known = [version.version for version in self.versions(model)]
        kept = {*known[-keep:], *besides}
        marked = numbers(self._place.children(f"{model}/removals"))  # by one that was killed
        removed = [
            number for number in sorted({*known} - kept | {*marked}) if self._collect(model, number, kept)
        ]
        self._history.shorten(model, _HISTORY)
        self._place.sweep(model, _STALE_S, self._clock())
        return removed

    def _collect(self, model: str, number: int, kept: Collection[int]) -> bool:
        """Remove a version unless it is in use.

        Removal marks the version, then checks whether it is in use. A user does the opposite: takes it, then
        checks for a mark. So at least one of the two notices the other (`_check_stays`).
        """
        mark = _mark(model, number)
        self._place.put(mark, b"to be removed\n")
        active = self.actives(model).values()
        in_use = {*kept, *self.pinned(model), *active, self._rollback_target(model)}
        if number not in in_use:
            self._place.remove_version(model, number)
        self._place.remove(mark)
        return number not in in_use

    def _check_stays(self, model: str, number: int, taken: str) -> None:
        """Undo `taken` if the version is being removed concurrently."""
        marked = number in numbers(self._place.children(f"{model}/removals"))
        if marked or self._complete(model, number) is None:
            self._place.remove(taken)
            raise UnknownVersionError(
                f"{model} version {number} is being removed; choose another or try again"
            )

    def _switch(self, model: str, number: int, action: Action, made_for: str = "") -> None:
        for _ in range(_MOST_ATTEMPTS):
            entry = self._history.append(model, number, action, made_for)
            self._check_stays(model, number, entry)
            if not self._history.is_overtaken(model, entry):
                return
        raise RepositoryError(f"too many processes are switching versions of {model}; try again")

    def _rollback_target(self, model: str) -> int | None:
        """The version active before, of those that are still there."""
        stack = self._history.stack(model)
        earlier = (number for number in stack[-2::-1] if number != stack[-1])
        return next((number for number in earlier if self._complete(model, number) is not None), None)

    def _complete(self, model: str, number: int) -> Version | None:
        folder = folder_of(model, number)
        document = self._place.read(f"{folder}/{MANIFEST}")
        if document is None:
            return None
        try:
            version = Version.from_json(document, where=f"{model} version {number}")
        except RepositoryError:
            return None
        sizes = self._place.sizes(f"{folder}/files")
        whole = all(sizes.get(name) == entry.bytes for name, entry in version.files.items())
        return version if whole and (version.model, version.version) == (model, number) else None

    def _fetch_file(self, version: Version, name: str, entry: StoredFile, target: Path) -> None:
        what = f"{name} of {version.model} version {version.version}"
        digest, size = hashlib.sha256(), 0
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            source = self._place.open(f"{folder_of(version.model, version.version)}/files/{name}")
        except FileNotFoundError:
            raise UnknownVersionError(f"{what} is gone: the version was removed meanwhile") from None
        with source, target.open("xb") as opened:
            while (chunk := source.read(_CHUNK)) and size <= entry.bytes:
                digest.update(chunk)
                size += opened.write(chunk)
            opened.flush()
            os.fsync(opened.fileno())
        if digest.hexdigest() != entry.sha256:
            raise RepositoryError(f"{what} is not what was published (sha256 differs); publish it again")


def _pin(model: str, number: int) -> str:
    return f"{model}/pins/{number:08d}"


def _mark(model: str, number: int) -> str:
    return f"{model}/removals/{number:08d}"


def _parents(name: str) -> list[str]:
    """The folders a file lies in."""
    parts = name.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]
