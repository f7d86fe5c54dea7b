"""Files of traces and dialogues, gzipped or not, and their JSON lines."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gati.errors import TraceError

_GZIPPED = b"\x1f\x8b"  # how every gzipped file begins; browsers and servers change names
_FILLING = re.compile(rb"\0+")  # some programs fill up blocks
_CHUNK = 2**16


def content_of(path: Path, wanted: str) -> bytes | bytearray:
    """The bytes of a file, decompressed if it is gzipped; `wanted` describes it for error messages.

    Raises TraceError for a file that does not exist or cannot be read.
    """
    try:
        raw = path.read_bytes()
        return _decompressed(raw) if raw.startswith(_GZIPPED) else raw
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist; give {wanted}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def _decompressed(raw: bytes) -> bytearray:
    content, at = bytearray(), 0
    while at < len(raw):  # files may be joined, even thousands
        if not raw.startswith(_GZIPPED, at):
            raise OSError("something else follows its gzipped content; compress it again")
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
        while not unpacker.eof:
            part = raw[at : at + _CHUNK]  # what is left over is copied, so it must not be all the rest
            if not part:
                raise EOFError("its gzipped content is incomplete; copy it again")
            content += unpacker.decompress(part)
            at += len(part)
        at -= len(unpacker.unused_data)
        if filling := _FILLING.match(raw, at):
            at = filling.end()
    return content


def text_of(path: Path, content: bytes | bytearray, wanted: str) -> str:
    """The text of a file in UTF-8, without the mark at its beginning; `wanted` as in `content_of`.

    Raises TraceError for anything else.
    """
    try:
        return content.decode("utf-8-sig")  # programs on Windows write the mark
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path} is not UTF-8 text, gzipped or not ({error.reason} at byte {error.start}); give {wanted}"
        ) from None


def lines_of(text: str) -> Iterator[str]:
    """The lines of a text, which may end as on any system; the last may be empty."""
    # not splitlines: JSON strings may contain separators that it splits at, such as U+2028
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    begin = 0
    while (end := text.find("\n", begin)) >= 0:  # not split: the text may fill half of the memory
        yield text[begin:end]
        begin = end + 1
    yield text[begin:]


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
