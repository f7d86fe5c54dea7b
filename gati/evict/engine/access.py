"""The access log of an engine: one record per request, for training predictors."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import IO

from gati.errors import StorageError
from gati.evict.trace.files import append_line

_log = logging.getLogger("gati.engine")

_TAIL_BYTES = 65_536


@dataclass(frozen=True)
class PrefixAccess:
    """An admitted request: the time in milliseconds since the epoch, and the names of its whole pages."""

    time_ms: int
    input_tokens: int
    output_tokens: int  # at most
    names: Sequence[bytes]
    hits: int  # leading pages that were cached
    capacity_pages: int


def access_line(access: PrefixAccess) -> str:
    """The record as a line of Mooncake's traces, which `gati evict replay` and `train` read."""
    record = {
        "timestamp": access.time_ms,
        "input_length": access.input_tokens,
        "output_length": access.output_tokens,
        # 53 bits, which every JSON reader represents exactly
        "hash_ids": [int.from_bytes(name[:8], "little") >> 11 for name in access.names],
        "hits": access.hits,
        "capacity_blocks": access.capacity_pages,
    }
    return json.dumps(record, separators=(",", ":"))


class AccessFile:
    """Appends records to a file, one per line. Requests shorter than a page are not logged.

    If the disk is full, the engine continues without the access log, and logs one error. If the file is
    renamed or removed, as by logrotate, the next record begins a new one of its name.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises StorageError if it cannot be written."""
        self._path = path
        try:
            self._file, self._last_ms = _opened(path)
        except OSError as error:
            raise StorageError(
                f"cannot write the access log {path} ({error.strerror}); name another"
            ) from error
        self._failed = False

    def accessed(self, access: PrefixAccess) -> None:
        """Write a line."""
        if not access.names or self._failed:
            return
        try:
            self._follow()
            self._last_ms = max(self._last_ms, access.time_ms)  # the system's clock may be set back
            length = os.fstat(self._file.fileno()).st_size
            try:
                line = access_line(replace(access, time_ms=self._last_ms))
                append_line(self._file, line.encode() + b"\n")
            except OSError:
                with suppress(OSError):  # a line written in part would spoil the trace
                    self._file.truncate(length)
                raise
        except OSError as error:
            self._failed = True
            _log.error("writing the access log failed; it ends here", extra={"reason": str(error)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _follow(self) -> None:
        """Open the file of that name, if it is another one by now."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        file, last_ms = _opened(self._path)
        self._file.close()
        self._file, self._last_ms = file, max(self._last_ms, last_ms)


def _opened(path: Path) -> tuple[IO[bytes], int]:
    """A file to append lines to, and the time of its last record.

    A last line that was written in part, as by a crash, is ended.
    """
    file = path.open("ab", buffering=0)
    status = os.fstat(file.fileno())
    if not S_ISREG(status.st_mode) or not status.st_size:
        return file, 0
    with path.open("rb") as written:
        line = _last_line(written, status.st_size)
    if not line.endswith(b"\n"):
        append_line(file, b"\n")
    return file, _time_ms(line)


def _last_line(file: IO[bytes], size: int) -> bytes:
    length = _TAIL_BYTES
    while True:
        file.seek(max(0, size - length))
        tail = file.read()
        begin = tail.rfind(b"\n", 0, -1) + 1
        if begin or length >= size:
            return tail[begin:]
        length *= 8


def _time_ms(line: bytes) -> int:
    try:
        time_ms: int = math.ceil(json.loads(line)["timestamp"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # no record
        return 0
    return time_ms
