"""The file of `gati.guard.standing`: what can be believed of it, and writing it in order."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gati.documents import DocumentKind, key, values_of
from gati.errors import AdaptError, StorageError
from gati.files import atomic_write_text, remove_unfinished

_log = logging.getLogger(__name__)

_KIND = DocumentKind(1, AdaptError, "versions are on probation until they are proven anew", compact=True)
CLOCK_ERROR_S = 60.0  # by which clocks may differ
_PRESUMED_SPENT = 20  # proofs, where the count was lost
# also in a file that is cut short, or of a newer format
_COUNTED = re.compile(rb'"spent"\s*:\s*(\d{1,15})\s*[,}]')


@dataclass(frozen=True, kw_only=True)
class DeltaShares:
    """One part of the file: the number of shares of `delta` that proofs took, `delta` being a process's part.

    Those up to number `since` may have been of parts of another size; None: an older file does not say so.
    """

    delta: float
    taken: int = field(metadata=key("spent"))
    since: int | None = None

    def are_of(self, delta: float) -> bool:
        """Whether later ones than `since` were of a part of this size."""
        return self.since is not None and math.isclose(self.delta, delta)

    def of_other_parts(self, delta: float) -> int:
        """The number of the last share that may not have been of a part of this size."""
        return self.since or 0 if self.are_of(delta) else self.taken


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """The rest: each watch (`Watch.to_json`) with the time of its last audit, and the parts of others.

    `distrusted`: why an earlier file was lost, at `lost_s`; versions of before that are not among these are
    on probation.
    """

    versions: dict[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)
    distrusted: str = ""
    lost_s: float | None = None


_NO_SHARES = DeltaShares(delta=0.0, taken=0)


@dataclass
class Saved:
    """What a file says.

    By name of a version: its watch as JSON values, when its last audit was taken in (in seconds since 1970),
    the delta of all its proofs, and whether it was ever certified. `parts` are of other components. `lost`:
    why something that was known is not any more, which was found at `lost_s`. `written_s`: when the file was
    last written, 0 if it is not known.
    """

    versions: dict[str, Any] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)
    deltas: dict[str, float] = field(default_factory=dict)
    certified: set[str] = field(default_factory=set)
    parts: dict[str, Any] = field(default_factory=dict)
    shares: DeltaShares = _NO_SHARES
    lost: str = ""
    lost_s: float = 0.0
    written_s: float = 0.0

    def text(self) -> str:
        """The content of the file; `versions` must say the rest of each."""
        lost_s = self.lost_s if self.lost else None
        kept = _Kept(versions=self.versions, parts=self.parts, distrusted=self.lost, lost_s=lost_s)
        return _KIND.text_of({**values_of(self.shares), **vars(kept)})

    def _lose(self, reason: str, now_s: float) -> None:
        """Something that the file said is lost: not before it was written, also if the clock was set back."""
        self.lost, self.lost_s = reason, max(now_s, self.written_s, self.lost_s)
        _log.warning("the state of versions is unknown; they are on probation: %s", reason)

    def _take(self, name: str, kept: dict[str, Any], model_delta: float) -> None:
        """Take in one version. Raises like a mapping or a number if it is damaged, and leaves it out."""
        delta = float(kept.get("delta", model_delta))  # missing in older files, like all others here
        heard_s = float(kept.get("heard_s", self.written_s))
        if not 0.0 < delta < 1.0:
            raise ValueError(f"delta is {delta!r}")
        json.dumps(kept, allow_nan=False)  # else no later file could be written
        self.versions[name] = {**kept, "delta": delta}
        self.deltas[name], self.heard_s[name] = delta, heard_s
        if kept.get("certified", kept.get("state") == "stopped"):
            self.certified.add(name)


def read_saved(path: Path, now_s: float) -> Saved:
    """What the file at `path` says, as far as it can be read; nothing if there is none."""
    saved = _read(path, now_s)
    if saved.lost_s > now_s + CLOCK_ERROR_S:
        _log.warning(
            "no certificate counts for another %.1f days: by this machine's clock, %s is from the future; "
            "set the clock, or if it is right, stop the process and delete the file, which forgets all stops",
            (saved.lost_s - now_s) / 86_400.0,
            path,
        )
    return saved


def _read(path: Path, now_s: float) -> Saved:
    saved, where = Saved(), str(path)
    with suppress(OSError):
        saved.written_s = path.stat().st_mtime
    try:
        document = _KIND.read(path)
        shares = _KIND.record(DeltaShares, document, where)  # count even if the rest of the file is damaged
    except AdaptError as error:
        if not _is_missing(error):
            saved.shares = _presumed(path)
            saved._lose(str(error), now_s)
        return saved
    saved.shares = shares
    try:
        kept = _KIND.record(_Kept, document, where)
        with _KIND.reading(where):
            json.dumps(kept.parts, allow_nan=False)
    except AdaptError as error:
        saved._lose(str(error), now_s)
        return saved
    saved.parts = kept.parts
    if kept.distrusted:
        saved.lost = kept.distrusted
        saved.lost_s = saved.written_s if kept.lost_s is None else kept.lost_s
        _log.warning("an earlier state of versions was lost; others are on probation: %s", saved.lost)
    for name, each in kept.versions.items():
        try:
            with _KIND.reading(f"{where}: version {name}"):
                saved._take(name, each, shares.delta)
        except AdaptError as error:  # the others are believed
            saved._lose(str(error), now_s)
    return saved


def read_shares(path: Path) -> DeltaShares | None:
    """The shares of delta that proofs of another process took, as its file says; None if there is none."""
    try:
        return _KIND.record(DeltaShares, _KIND.read(path), str(path))
    except AdaptError as error:
        return None if _is_missing(error) else _presumed(path)


def _presumed(path: Path) -> DeltaShares:
    """The shares that proofs took by a file that cannot be read: as many as its text says at most."""
    counts = [_PRESUMED_SPENT]
    with suppress(OSError):
        counts += map(int, _COUNTED.findall(path.read_bytes()))
    return DeltaShares(delta=0.0, taken=max(counts))


def _is_missing(error: AdaptError) -> bool:
    return isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)


class Snapshot(NamedTuple):
    """The content of the file at one moment; later snapshots have higher numbers."""

    number: int
    text: str


class SnapshotFile:
    """Writes snapshots to `path`, none over a later one. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0  # the last number
        self._writing = threading.Lock()
        self._failing = False

    def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot, unless a later one was written.

        A failure is logged, and the file stays as it was.
        """
        with self._writing:
            if snapshot.number <= self._written:
                return
            if not self._written:
                remove_unfinished(self._path.parent)
            self._written = snapshot.number
            try:
                atomic_write_text(self._path, snapshot.text)
            except StorageError as error:  # caches must stop even if the file cannot be written
                if not self._failing:
                    _log.error("cannot save the state and evidence of versions: %s", error)
                self._failing = True
            else:
                self._failing = False

    def skip(self, number: int) -> None:
        """Write no snapshot up to that number from now on."""
        with self._writing:
            self._written = max(self._written, number)
