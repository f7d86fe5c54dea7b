"""Files of traces and dialogues: packed or not, and their lines of JSON."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from gati.errors import TraceError


def content_of(path: Path, wanted: str) -> bytes:
    """The bytes of a file, unpacked if it is packed (.gz); `wanted` says what to give instead of none.

    Raises TraceError for a file that does not exist or cannot be read.
    """
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist; give {wanted}") from None
    except (OSError, EOFError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def json_object(line: str, where: str) -> dict[str, Any]:
    """The JSON object of a line. Raises TraceError, which begins with `where`, for anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter for thousands of brackets
        raise TraceError(f"{where} is not JSON ({error}): {line[:60]!r}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where} is not a JSON object: {line[:60]!r}")
    return record
