"""The storage of a repository: a directory; `gati.versions.objects` has object stores.

Both hold, for every model,

    versions/00000001/manifest.json, versions/00000001/files/...
    activations/, pins/, removals/      small records, each written once
    temporary/  or  claims/             what is not finished

A directory's version appears by one rename of a folder that is complete and flushed to the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from gati.errors import AdaptError, StorageError
from gati.versions.lineage import StoredFile

MANIFEST = "manifest.json"

Source = bytes | Path
Manifest = Callable[[int, Mapping[str, StoredFile]], bytes]

_CHUNK = 2**20


class Place(Protocol):
    """Files under names with slashes, all relative to the repository and checked by the caller."""

    def children(self, path: str) -> list[str]:
        """Names directly below `path`, sorted; none if there is no such folder."""

    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of all files below `path`, by their path relative to it."""

    def open(self, path: str) -> IO[bytes]:
        """Open for reading. Raises FileNotFoundError."""

    def read(self, path: str) -> bytes | None:
        """A small file; None if there is none."""

    def put(self, path: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""

    def remove(self, path: str) -> None:
        """Remove one small file, if it is there."""

    def publish(self, model: str, files: Mapping[str, Source], manifest: Manifest) -> int:
        """Store `files` atomically as the next version; returns its number."""

    def remove_version(self, model: str, number: int) -> None:
        """Remove a version so that no reader sees a part of it."""

    def sweep(self, model: str, older_than_s: float, now: float) -> None:
        """Remove leftovers of unfinished publications and removals older than this, in seconds.

        Those above the newest version may stay until there is a newer one: their publisher may only be slow.
        """


def folder_of(model: str, number: int) -> str:
    """Path of a version."""
    return f"{model}/versions/{number:08d}"


def numbers(names: list[str]) -> list[int]:
    """The version numbers among `names`, rising."""
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and len(name) >= 8)


def folder_files(folder: Path) -> dict[str, Source]:
    """All files below a folder, by their relative path."""
    if not folder.is_dir():
        raise AdaptError(f"{folder} is not a folder; publish a folder of files, or files by name")
    found: dict[str, Source] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise AdaptError(f"{path} is a link or not a regular file; publish regular files only")
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = path
    return found


def copy(source: Source, target: IO[bytes]) -> StoredFile:
    """Copy to an open file and say what was copied."""
    digest, size = hashlib.sha256(), 0
    for chunk in _chunks(source):
        digest.update(chunk)
        target.write(chunk)
        size += len(chunk)
    return StoredFile(digest.hexdigest(), size)


def _chunks(source: Source) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with source.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            yield chunk


class Directory:
    """A repository in a directory of a local or network file system with renames and locks."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def _path(self, path: str) -> Path:
        """The resolved path. Raises AdaptError if a link leads outside the repository."""
        found = self._root / path
        if not found.resolve().is_relative_to(self._root.resolve()):
            raise AdaptError(f"{path} is outside the repository")
        return found

    def children(self, path: str) -> list[str]:
        """See `Place`."""
        try:
            return sorted(os.listdir(self._path(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError(f"cannot list {path} in the repository: {error.strerror or error}") from error

    def sizes(self, path: str) -> dict[str, int]:
        """See `Place`."""
        top, found = self._path(path), {}
        for folder, _, names in os.walk(top):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    file = Path(folder, name)
                    found[file.relative_to(top).as_posix()] = file.lstat().st_size
        return found

    def open(self, path: str) -> IO[bytes]:
        """See `Place`."""
        return self._path(path).open("rb")

    def read(self, path: str) -> bytes | None:
        """See `Place`."""
        try:
            return self._path(path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"cannot read {path} in the repository: {error.strerror}") from error

    def put(self, path: str, data: bytes) -> None:
        """See `Place`."""
        target = self._path(path)
        with self._temporary(path.split("/")[0]) as temporary, _said(path):
            (temporary / "file").write_bytes(data)
            _flush(temporary / "file")
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary / "file", target)
            _flush(target.parent)

    def remove(self, path: str) -> None:
        """See `Place`."""
        with _said(path):
            self._path(path).unlink(missing_ok=True)

    def publish(self, model: str, files: Mapping[str, Source], manifest: Manifest) -> int:
        """See `Place`."""
        with self._temporary(model) as temporary, _said(model):
            folder = temporary / "version"
            entries = {name: self._store(folder / "files" / name, source) for name, source in files.items()}
            versions = self._path(f"{model}/versions")
            versions.mkdir(parents=True, exist_ok=True)
            with self._locked(model):
                number = max(numbers(self.children(f"{model}/versions")), default=0) + 1
                (folder / MANIFEST).write_bytes(manifest(number, entries))
                _flush(folder / MANIFEST)
                for parent, _, _ in os.walk(folder, topdown=False):
                    _flush(Path(parent))
                os.rename(folder, self._path(folder_of(model, number)))
                _flush(versions)
            return number

    def remove_version(self, model: str, number: int) -> None:
        """See `Place`."""
        with (
            self._temporary(model) as temporary,
            _said(model),
            self._locked(model),
            contextlib.suppress(FileNotFoundError),
        ):
            os.rename(self._path(folder_of(model, number)), temporary / "version")

    def sweep(self, model: str, older_than_s: float, now: float) -> None:
        """See `Place`."""
        for name in self.children(f"{model}/temporary"):
            stale = self._path(f"{model}/temporary/{name}")
            if now - _newest(stale) > older_than_s:
                with self._temporary(model) as bin_, contextlib.suppress(FileNotFoundError):
                    os.rename(stale, bin_ / "stale")  # at once, lest a slow publisher loses only a part

    @staticmethod
    def _store(target: Path, source: Source) -> StoredFile:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as opened:
            entry = copy(source, opened)
            opened.flush()
            os.fsync(opened.fileno())
        return entry

    @contextmanager
    def _temporary(self, model: str) -> Iterator[Path]:
        """A new folder next to the versions, removed afterwards with its contents."""
        folder = self._path(f"{model}/temporary/{uuid.uuid4().hex}")
        with _said(model):
            folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _locked(self, model: str) -> Iterator[None]:
        """Hold the model's lock, which the system releases if the process is killed."""
        with open(self._path(f"{model}/lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _newest(folder: Path) -> float:
    """The latest change in a folder, seconds since 1970."""
    times = [0.0]
    for parent, _, names in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):
                times.append(os.lstat(path).st_mtime)
    return max(times)


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _said(what: str) -> Iterator[Any]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {what} in the repository: {error.strerror or error}; free space or choose a "
            "directory you may write to"
        ) from error
