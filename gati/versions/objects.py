"""A repository on an object store, through any file system that fsspec knows.

Such stores have no rename and often no exclusive creation. A publisher first *claims* a number: it writes a
claim under its own name, lists the claims for that number, and continues only if it is alone; if not it
withdraws and tries a later number. Of two publishers at least one sees the other, as long as a listing shows
what was written before it, which S3, Google's and Azure's stores guarantee. If meanwhile the number was
given, its version published and perhaps collected again, there is a newer one. Then come the files, and
last the manifest: without it there is no version.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from gati.errors import AdaptError, RepositoryError, StorageError, first_line
from gati.versions.lineage import StoredFile
from gati.versions.places import MANIFEST, Manifest, Source, copy, folder_of, numbers

# What fsspec needs for an object store, by the kind of its URLs.
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_MOST_CLAIMS = 100
_CLAIM_PAUSE_S = 0.05


def connect(url: str) -> Objects:
    """The place at an fsspec URL, as `s3://bucket/models` or `memory://models`.

    **Raises:** `AdaptError` for a URL of no known kind, or a missing package.
    """
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError:
        raise AdaptError('a repository at a URL needs fsspec: pip install "gati[stream]"') from None
    kind = url.split("://")[0]
    try:
        filesystem, root = url_to_fs(url)
    except ImportError as error:
        remedy = f"pip install {_PACKAGES[kind]}" if kind in _PACKAGES else first_line(error)
        raise AdaptError(f"a repository at {kind}:// needs another package: {remedy}") from error
    except ValueError as error:
        raise AdaptError(f"a repository at {kind}:// is not supported: {error}") from error
    return Objects(filesystem, root)


class Objects:
    """Objects under `root` of an fsspec file system, which writes each whole or not at all."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = str(filesystem._strip_protocol(root)).rstrip("/")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def children(self, path: str) -> list[str]:
        """See `Place`."""
        with self._said(path):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(path), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted({name for each in found if (name := str(each).rstrip("/").rsplit("/", 1)[-1])})

    def sizes(self, path: str) -> dict[str, int]:
        """See `Place`."""
        with self._said(path):
            self._fs.invalidate_cache()
            found = self._fs.find(self._path(path), detail=True)
        start = len(self._path(path)) + 1
        return {name[start:]: int(info["size"]) for name, info in found.items()}

    def open(self, path: str) -> IO[bytes]:
        """See `Place`."""
        opened: IO[bytes] = self._fs.open(self._path(path), "rb")
        return opened

    def read(self, path: str) -> bytes | None:
        """See `Place`."""
        with self._said(path):
            try:
                return bytes(self._fs.cat_file(self._path(path)))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def put(self, path: str, data: bytes) -> None:
        """See `Place`."""
        with self._said(path):
            try:
                self._fs.pipe_file(self._path(path), data)
            except FileNotFoundError:  # a file system with folders
                self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
                self._fs.pipe_file(self._path(path), data)

    def remove(self, path: str) -> None:
        """See `Place`."""
        with self._said(path), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(path))

    def publish(self, model: str, files: Mapping[str, Source], manifest: Manifest) -> int:
        """See `Place`."""
        number, claim = self._claim(model)
        folder = folder_of(model, number)
        try:
            entries = {name: self._store(f"{folder}/files/{name}", source) for name, source in files.items()}
            document = manifest(number, entries)
            if claim.rsplit("/", 1)[1] not in self.children(claim.rsplit("/", 1)[0]):
                raise RepositoryError(
                    f"publishing {model} took too long, so its files were removed; try again"
                )
            self.put(f"{folder}/{MANIFEST}", document)
        except BaseException:
            self.remove_version(model, number)
            self.remove(claim)
            raise
        self.remove(claim)
        return number

    def remove_version(self, model: str, number: int) -> None:
        """See `Place`."""
        self.remove(f"{folder_of(model, number)}/{MANIFEST}")
        self._remove_files(folder_of(model, number))

    def sweep(self, model: str, older_than_s: float, now: float) -> None:
        """See `Place`. The order of the questions matters: a version is published before its claim goes.

        Numbers above the newest version are left alone until there is a newer one: a publisher that only
        slept would share its number with the next one, and remove its version.
        """
        found = numbers(self.children(f"{model}/versions"))
        halves = [number for number in found if not self._finished(model, number)]
        claimed = numbers(self.children(f"{model}/claims"))
        newest = max({*found} - {*halves}, default=0)
        for number in (each for each in {*halves, *claimed} if each <= newest):
            claims = [f"{model}/claims/{number:08d}/{name}" for name in self._claims(model, number)]
            if any(now - self._claimed_at(claim) <= older_than_s for claim in claims):
                continue
            for claim in claims:
                self.remove(claim)
            if number in halves and not self._finished(model, number):
                self.remove_version(model, number)

    def _claim(self, model: str) -> tuple[int, str]:
        """A free number, and the claim that reserves it."""
        least = 1
        for _ in range(_MOST_CLAIMS):
            taken = self._numbers(model)
            number = max(least, max(taken, default=0) + 1)
            mine = uuid.uuid4().hex
            claim = f"{model}/claims/{number:08d}/{mine}"
            self.put(claim, json.dumps({"time_s": time.time()}).encode())
            alone = self._claims(model, number) == [mine]  # first: a claim is removed after publication
            newest = max(numbers(self.children(f"{model}/versions")), default=0)  # it is never collected
            if alone and newest < number:
                return number, claim
            self.remove(claim)
            least = number + 1
            time.sleep(random.uniform(0.0, _CLAIM_PAUSE_S))
        raise RepositoryError(f"too many processes are publishing {model}; try again")

    def _numbers(self, model: str) -> list[int]:
        return numbers([*self.children(f"{model}/claims"), *self.children(f"{model}/versions")])

    def _claims(self, model: str, number: int) -> list[str]:
        return self.children(f"{model}/claims/{number:08d}")

    def _claimed_at(self, claim: str) -> float:
        """Seconds since 1970; long ago for a claim that is gone or cut short."""
        try:
            return float(json.loads(self.read(claim) or b"")["time_s"])
        except (ValueError, TypeError, KeyError):
            return 0.0

    def _finished(self, model: str, number: int) -> bool:
        """Whether there is a manifest, be it of a later format; not one cut short."""
        try:
            return "sha256" in json.loads(self.read(f"{folder_of(model, number)}/{MANIFEST}") or b"{}")
        except (ValueError, TypeError):
            return False

    def _store(self, path: str, source: Source) -> StoredFile:
        with self._said(path):
            try:
                target = self._fs.open(self._path(path), "wb")
            except FileNotFoundError:  # a file system with folders
                self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
                target = self._fs.open(self._path(path), "wb")
            with target:
                return copy(source, target)

    def _remove_files(self, folder: str) -> None:
        with self._said(folder):
            for name in self.sizes(folder):
                self.remove(f"{folder}/{name}")
            with contextlib.suppress(FileNotFoundError, NotImplementedError):
                self._fs.rm(self._path(folder), recursive=True)  # where folders are things of their own

    @contextmanager
    def _said(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"the repository's store failed at {what}: {error}; try again") from error
