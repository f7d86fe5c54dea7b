"""Sinks for answers: the result record, the interface, and a JSON Lines file."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

from gati.errors import StorageError
from gati.video.frames import Frame, Region


@dataclass(frozen=True)
class Result:
    """The answer for one picture, or for one region of it.

    `time_s` is stream time and `frame_index` the picture's number; `region` is None if the whole picture was
    classified. `exit` is the block that the answer left at, or `base`. `latency_ms` is this answer's latency,
    `base_latency_ms` the base model's, if known. `version` is that of the caches. `audited` says
    whether the base model's class is compared with it; `agreed` is the outcome if it was known at once, else
    None: audits of early answers run in the background.
    """

    time_s: float
    frame_index: int
    source: str
    region: Region | None
    class_index: int
    class_name: str | None
    probability: float
    exit: str
    latency_ms: float
    base_latency_ms: float | None
    version: str
    audited: bool = False
    agreed: bool | None = None

    def as_json(self) -> str:
        """One line of JSON: the fields by name, `region` as [x, y, width, height].

        Names of files that are not UTF-8 have question marks.
        """
        fields: dict[str, Any] = asdict(self)
        if self.region is not None:
            fields["region"] = [self.region.x, self.region.y, self.region.width, self.region.height]
        finite = {name: None if _not_finite(value) else value for name, value in fields.items()}
        return json.dumps(finite, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()


class Sink(Protocol):
    """Receives results one by one, each with its picture; call `close` once at the end."""

    def write(self, result: Result, frame: Frame) -> None:
        """Process a result."""

    def close(self) -> None:
        """Finish all pending work."""


class JsonLinesSink:
    """Appends results to a file or pipe, one JSON object per line, or prints them if `path` is `-`.

    Every line is flushed at once, so that another program can follow; an unfinished line of an earlier run is
    terminated first.
    """

    def __init__(self, path: str | Path) -> None:
        self._name = "standard output" if str(path) == "-" else str(path)
        self._stream: TextIO | None = None
        try:
            self._stream = sys.stdout if str(path) == "-" else _open_for_lines(Path(path))
        except OSError as error:
            raise _storage_error(self._name, error) from error
        self._owned = str(path) != "-"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, result: Result, frame: Frame) -> None:
        """Write one line; StorageError if the disk is full or standard output is closed."""
        if self._stream is None:
            raise StorageError(f"cannot write {self._name}: it was closed")
        try:
            self._stream.write(result.as_json() + "\n")
            self._stream.flush()
        except OSError as error:
            raise _storage_error(self._name, error) from error

    def close(self) -> None:
        """Close the file; standard output stays open."""
        stream, self._stream = self._stream, None
        if stream is not None and self._owned:
            try:
                stream.close()
            except OSError as error:
                raise _storage_error(self._name, error) from error


def _open_for_lines(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # such as a pipe, which cannot be read back
        return path.open("w", encoding="utf-8")
    stream = path.open("a+b")
    try:
        if stream.seek(0, 2) > 0:
            stream.seek(-1, 2)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
    finally:
        stream.close()
    return path.open("a", encoding="utf-8")


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _storage_error(name: str, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {name}: {error.strerror or error}; free space, or choose another place"
    )
