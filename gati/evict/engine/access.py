"""The access log of an engine: one record per request, for training predictors."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gati.errors import StorageError

_log = logging.getLogger("gati.engine")


@dataclass(frozen=True)
class PrefixAccess:
    """An admitted request: the time in milliseconds since the epoch, and the names of its whole pages."""

    time_ms: int
    input_tokens: int
    output_tokens: int  # at most
    names: Sequence[bytes]
    hits: int  # leading pages that were cached
    capacity_pages: int


class AccessSink(Protocol):
    """Receives records in the order of requests. It must not block, because the engine waits for it."""

    def accessed(self, access: PrefixAccess) -> None:
        """A request was admitted."""

    def close(self) -> None:
        """No more records will follow."""


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

    If the disk is full, the engine continues without the access log, and logs one error.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises StorageError if it cannot be written."""
        try:
            self._file = path.open("ab", buffering=0)
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
            self._file.write(access_line(access).encode() + b"\n")
        except OSError as error:
            self._failed = True
            _log.error("writing the access log failed; it ends here", extra={"reason": str(error)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()
