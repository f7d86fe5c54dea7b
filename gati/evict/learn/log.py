"""The access log of an engine, written in the background without blocking the engine.

Each line is a request as JSON, in the format of traces for `gati evict replay`:

    {"timestamp": 1763840000123, "hash_ids": [12, 57, 803], "hits": 2, "capacity_blocks": 2000}

`timestamp` is in milliseconds, `hits` is the number of leading blocks that were cached. Some lines have
`figures`: counts of the engine's policy since its start. Each engine writes segments of a few MiB to its own
folder, and the oldest are removed. Segments are append-only; a line truncated by a crash or a full disk is
the last of its segment.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gati.evict.trace.files import append_line

_log = logging.getLogger("gati.evict")

_WAITING = 1024  # queued requests; further ones are dropped
_FIGURES_EVERY = 64  # requests
_AGAIN_S = 1.0  # after a failure to write
_CLOSE_S = 2.0
_INT = 2**63
_made = itertools.count(1)


class AccessLog:
    """Writes to a new subfolder of `folder`. Requests that cannot be written are dropped and counted.

    `capacity_blocks` is the capacity of the engine's cache, `figures` returns its counts. `requested` never
    waits for the disk.
    """

    def __init__(
        self,
        folder: Path,
        capacity_blocks: int,
        figures: Callable[[], Mapping[str, Any]],
        *,
        segment_bytes: int = 2**22,
        segments: int = 16,
    ) -> None:
        self.left_out = 0
        self._counting = threading.Lock()  # of what is left out, by callers and by the writing thread
        self.failures = 0
        self.folder = folder / f"{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}-{next(_made)}"
        self._capacity_blocks = capacity_blocks
        self._figures = figures
        self._segment_bytes, self._segments = segment_bytes, segments
        self._count = 0
        self._since_s: float | None = None  # time since 1970 at the zero of the engine's clock
        self._number = 0
        self._file: IO[bytes] | None = None
        self._again_s = 0.0
        self._queue: queue.Queue[tuple[Sequence[Hashable], int, float, Any] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name="gati-access-log", daemon=True)
        self._thread.start()

    def requested(self, ids: Sequence[Hashable], hits: int, time_s: float) -> None:
        """Log a request for these blocks, if there are any, at `time_s` of the engine's clock."""
        if not ids:  # a prompt shorter than a block
            return
        self._count += 1
        figures = dict(self._figures()) if self._count % _FIGURES_EVERY == 0 else None
        try:
            self._queue.put_nowait((ids, hits, time_s, figures))
        except queue.Full:
            self._leave_out()

    def close(self) -> None:
        """Write pending lines, for two seconds at most."""
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            lines = [self._line(*entry)]
            last = False
            while not self._queue.empty():
                entry = self._queue.get_nowait()
                if entry is None:
                    last = True
                    break
                lines.append(self._line(*entry))
            self._write(lines)
            if last:
                break
        if self._file is not None:
            self._file.close()

    def _line(self, ids: Sequence[Hashable], hits: int, time_s: float, figures: Any) -> bytes:
        if self._since_s is None:
            self._since_s = time.time() - time_s
        record = {
            "timestamp": round(1e3 * (self._since_s + time_s)),
            "hash_ids": list(map(name_number, ids)),
            "hits": hits,
            "capacity_blocks": self._capacity_blocks,
        }
        if figures is not None:
            record["figures"] = figures
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"

    def _write(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            if time.monotonic() < self._again_s:
                self._leave_out()
                continue
            try:
                file = self._opened()
                append_line(file, line)
                if file.tell() >= self._segment_bytes:
                    self._end_segment()
            except OSError as error:
                self._failed(error)

    def _leave_out(self) -> None:
        with self._counting:
            self.left_out += 1

    def _opened(self) -> IO[bytes]:
        if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
            self._end_segment()  # the service removed it, for room: what follows would not be read
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._number += 1
            self._file = segment_path(self.folder, self._number).open("xb", buffering=0)
            segment_path(self.folder, self._number - self._segments).unlink(missing_ok=True)
        return self._file

    def _end_segment(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _failed(self, error: OSError) -> None:
        """The line may be written in part, so the next one begins a new segment."""
        if not self.failures:
            _log.warning("accesses are not logged: %s", error)
        self.failures += 1
        self._leave_out()
        self._again_s = time.monotonic() + _AGAIN_S
        try:
            self._end_segment()
        except OSError as closing:
            _log.warning("a segment of the access log was not closed: %s", closing)


def segment_path(folder: Path, number: int) -> Path:
    """The path of an engine's segment; numbers begin at 1."""
    return folder / f"{max(number, 0):08d}.jsonl"


def name_number(block: Hashable) -> int:
    """A whole number for a block's name, the same in every process; 64-bit integers stay unchanged."""
    if isinstance(block, int) and -_INT <= block < _INT:
        return int(block)
    content = block if isinstance(block, bytes) else repr(block).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")
