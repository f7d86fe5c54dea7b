"""Files of traces and dialogues, gzipped or not, and their JSON lines."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import IO, Any

from gati.errors import TraceError

_GZIPPED = b"\x1f\x8b"  # how every gzipped file begins; browsers and servers change names


def content_of(path: Path, wanted: str) -> bytes:
    """The bytes of a file, decompressed if it is gzipped; `wanted` describes it for error messages.

    Raises TraceError for a file that does not exist or cannot be read.
    """
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw.startswith(_GZIPPED) else raw
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist; give {wanted}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def text_of(content: bytes) -> str:
    """The text of a file in UTF-8, without the mark at its beginning. Raises UnicodeDecodeError."""
    return content.decode("utf-8-sig")  # programs on Windows write the mark


def lines_of(text: str) -> list[str]:
    """The lines of a text, which may end as on any system; the last may be empty."""
    # not splitlines: JSON strings may contain separators that it splits at, such as U+2028
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def append_line(file: IO[bytes], line: bytes) -> None:
    """Append a line to an unbuffered file. Raises OSError if only a part of it was written."""
    written = file.write(line)
    if written != len(line):  # a full disk takes what fits, and raises only when asked again
        raise OSError(f"only {written} of {len(line)} bytes were written")


def json_object(line: str, where: str) -> dict[str, Any]:
    """The JSON object of a line. Raises TraceError, which begins with `where`, for anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError for thousands of brackets
        raise TraceError(f"{where} is not JSON ({error}): {line[:60]!r}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where} is not a JSON object: {line[:60]!r}")
    return record
