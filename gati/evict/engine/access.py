"""Which prefixes were asked for, told to whoever learns from it: one record a request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gati.errors import StorageError

__all__ = ["AccessFile", "AccessSink", "PrefixAccess", "access_line"]


@dataclass(frozen=True)
class PrefixAccess:
    """A request as it was admitted: when, in milliseconds since the epoch, and its whole pages by name."""

    time_ms: int
    input_tokens: int
    output_tokens: int  # at most
    names: Sequence[bytes]
    hits: int  # leading pages that were there


class AccessSink(Protocol):
    """Takes records in the order of the requests. It must not wait for anything: the engine does for it."""

    def accessed(self, access: PrefixAccess) -> None:
        """A request was admitted."""

    def close(self) -> None:
        """There will be no more."""


def access_line(access: PrefixAccess) -> str:
    """The record as a line of Mooncake's traces, which `gati evict replay` and `train` read."""
    record = {
        "timestamp": access.time_ms,
        "input_length": access.input_tokens,
        "output_length": access.output_tokens,
        # 53 bits, which every reader of JSON keeps exactly
        "hash_ids": [int.from_bytes(name[:8], "little") >> 11 for name in access.names],
        "hits": access.hits,
    }
    return json.dumps(record, separators=(",", ":"))


class AccessFile:
    """Appends records to a file, a line each. Requests shorter than a page leave none."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises StorageError where it cannot be written."""
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise StorageError(
                f"cannot write the access log {path} ({error.strerror}); name another"
            ) from error

    def accessed(self, access: PrefixAccess) -> None:
        """Write a line."""
        if access.names:
            self._file.write(access_line(access) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
