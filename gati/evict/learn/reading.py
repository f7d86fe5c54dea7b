"""Reading the access logs of all engines as they grow."""

from __future__ import annotations

import heapq
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gati.evict.learn.log import segment_path

_log = logging.getLogger("gati.eviction")

_CHUNK = 2**20
_LONGEST_LINE = 2**24
_LARGEST = 2**63  # number of anything
_MOST_AHEAD_S = 86_400.0  # by which clocks of engines may be ahead of this one


class AccessRecord(NamedTuple):
    """A request to an engine."""

    engine: str
    time_s: float
    ids: list[int]
    hits: int
    capacity_blocks: int
    figures: Mapping[str, Any]


@dataclass
class _Place:
    """The position up to which an engine's segments were read, and the lines not yet returned."""

    segment: int = 0
    offset: int = 0
    rest: bytes = b""
    lines: deque[bytes] = field(default_factory=deque)


class AccessReader:
    """Reads lines appended since the last call. `damaged` lines and `lost` segments are counted.

    Positions are not stored on disk: a new reader begins with the oldest segments. Lines more than
    a day ahead of `clock` count as damaged: nothing could be learned from their engine until then.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.damaged = 0
        self.lost = 0
        self._folder = folder
        self._clock = clock
        self._places: dict[str, _Place] = {}
        self._warned: set[str] = set()

    def read(self) -> Iterator[AccessRecord]:
        """New records of all engines in order of time; engines without a folder are forgotten.

        If the caller stops early, the next call returns the records after the last one it got.
        """
        engines = sorted(path.name for path in self._folder.glob("*/"))
        self._places = {name: self._places.get(name, _Place()) for name in engines}
        for record in heapq.merge(*map(self._engine, engines), key=lambda record: record.time_s):
            self._places[record.engine].lines.popleft()  # not before: the others' next records are read, too
            yield record

    def sweep(self, limit_bytes: int) -> None:
        """Remove the oldest segments until the others fit; each engine's newest segment comes last.

        An engine whose newest one is removed begins another. Empty folders of engines are removed, too.
        """
        found: list[tuple[bool, float, int, Path]] = []
        for folder in self._folder.glob("*/"):
            segments = self._segments(folder)
            for segment in segments:
                path = segment_path(folder, segment)
                try:
                    status = path.stat()
                except OSError:  # removed by its engine at this moment, or of another user
                    continue
                found.append((segment == segments[-1], status.st_mtime, status.st_size, path))
        total = sum(size for _, _, size, _ in found)
        for _, _, size, path in sorted(found):
            if total <= limit_bytes:
                return
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # such as one of another user
                self._warn("access logs take more than their limit: some cannot be removed", error)
            total -= size
            with suppress(OSError):  # there are others, or its engine begins one at this moment
                path.parent.rmdir()

    def _engine(self, name: str) -> Iterator[AccessRecord]:
        folder, place = self._folder / name, self._places[name]
        yield from self._whole(name, place)
        segments = self._segments(folder)
        if segments and place.segment < segments[0]:
            if place.segment:
                self.lost += segments[0] - place.segment - (not place.rest and place.offset > 0)
            place.segment, place.offset, place.rest = segments[0], 0, b""
        for segment in segments:
            if segment < place.segment:
                continue
            if segment > place.segment:
                self.damaged += bool(place.rest)  # a truncated line ends its segment
                place.segment, place.offset, place.rest = segment, 0, b""
            path = segment_path(folder, segment)
            try:
                yield from self._lines(name, path, place)
            except OSError as error:  # the other engines are read all the same, and this one again later
                self._warn(f"{path} cannot be read", error)
                return

    def _lines(self, name: str, path: Path, place: _Place) -> Iterator[AccessRecord]:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size  # lines appended meanwhile are read next time
                file.seek(place.offset)
                while chunk := file.read(min(_CHUNK, size - place.offset)):
                    place.offset += len(chunk)
                    *lines, place.rest = (place.rest + chunk).split(b"\n")
                    if len(place.rest) > _LONGEST_LINE:
                        place.rest = b"damaged"
                    place.lines.extend(lines)
                    yield from self._whole(name, place)
        except FileNotFoundError:
            return  # removed since it was listed; the next `read` counts it as lost

    def _whole(self, name: str, place: _Place) -> Iterator[AccessRecord]:
        """The requests of the lines that were read; `read` takes out each line as it returns its request."""
        while place.lines:
            record = _record(name, place.lines[0])
            if record is None or record.time_s > self._clock() + _MOST_AHEAD_S:
                self.damaged += 1
                place.lines.popleft()
            else:
                yield record

    def _warn(self, what: str, error: OSError) -> None:
        """Say something once."""
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("%s (%s)", what, error.strerror)

    def _segments(self, folder: Path) -> list[int]:
        return sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal())


def _record(engine: str, line: bytes) -> AccessRecord | None:
    """The request of a line, None if the line is invalid."""
    try:
        found = json.loads(line)
        ids, figures = found["hash_ids"], found.get("figures", {})
        record = AccessRecord(
            engine,
            1e-3 * float(found["timestamp"]),
            ids,
            int(found["hits"]),
            int(found["capacity_blocks"]),
            figures,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    sound = (
        isinstance(ids, list)
        and all(type(each) is int for each in ids)
        and isinstance(figures, dict)
        and all(type(each) in (int, float) and abs(each) < _LARGEST for each in figures.values())
        and math.isfinite(record.time_s)
        and 1 <= record.capacity_blocks < _LARGEST
        and 0 <= record.hits <= len(ids)
        and len(set(ids)) == len(ids)  # after the check of types: lists cannot be in sets
    )
    return record if sound and ids else None
