"""Reading traces: Mooncake's and Qwen-Bailian's JSON lines, CSV and Parquet, gzipped or not."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gati.errors import TraceError
from gati.evict.trace.dialogues import Prompts
from gati.evict.trace.files import content_of, json_object, lines_of, text_of
from gati.evict.trace.numbering import BlockNumbering
from gati.evict.trace.records import Talk, Trace, numbered_trace

_BLOCKS = ("hash_ids", "blocks", "block_ids", "ids", "items", "item", "key")
_STAMP = "timestamp"  # in milliseconds, or in seconds if any has fractions
_TIMES = {_STAMP: 1e-3, "time_ms": 1e-3, "time_s": 1.0, "time": 1.0, "arrived_at": 1.0}
_BLOCK_SIZES = ("block_size", "obj_size")
_SUFFIXES = (
    "JSON lines (.jsonl), CSV (.csv), Parquet (.parquet), or lines of identifiers (.txt), gzipped or not"
)
_WANTED = f"a file with a trace: {_SUFFIXES}"
_AT_ONCE = 1_000  # rows of Parquet, which take much more memory as objects
_DIGITS = 640  # the least limit that Python can have for the conversion of text to whole numbers
_DATE = re.compile(r"-\d{8}(\d{2}|-\d+)?$")  # at the end of a rotated log's name
_CSV_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")  # with its end, which may be in quotation marks


class _Stamp(NamedTuple):
    """The time of a request as a file has it: its column and value, and whether it may have fractions."""

    key: str
    value: float
    fractions: bool


class _Row(NamedTuple):
    """The content of a line."""

    line: int
    blocks: list[int | str]
    stamp: _Stamp | None = None
    talk: Talk | None = None


def read_trace(path: str | Path, *, flat: bool = False, limit: int | None = None) -> Trace:
    """Read a trace; the format follows from its suffix.

    JSON lines have `hash_ids` (or `blocks`) and `timestamp`: in milliseconds if all are whole numbers (as in
    Mooncake), else in seconds (as in Qwen-Bailian). CSV and Parquet have columns of the same names and units,
    with one row per request and blocks separated by blanks. In .txt files, each line is a request. JSON lines
    from `gati evict synthesise` also have the users' prompts. `flat` reads blocks as independent, not as
    paths of a tree; `limit` keeps the first requests.

    Raises TraceError, with the line number, for content that cannot be read.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise TraceError(f"--limit is {limit}; keep at least one request")
    sha256, rows = _opened(path)
    kept = _KeptRequests(flat=flat)
    fractions = False
    for row in rows:
        fractions = fractions or _in_seconds(row.stamp)
        if limit is None or len(kept) < limit:
            kept.add(row)
    return kept.trace(path, sha256, {**_TIMES, _STAMP: 1.0} if fractions else _TIMES)


class _KeptRequests:
    """The requests of a file in arrays: with objects, they take many times its size."""

    def __init__(self, *, flat: bool) -> None:
        self._blocks = BlockNumbering(flat=flat)
        self._lines, self._times = array("q"), array("d")
        self._clocks: list[str] = []  # the column of each time
        self._untimed: int | None = None  # the first line without a time
        self._talks: list[Talk] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, row: _Row) -> None:
        self._blocks.add(row.blocks)
        self._lines.append(row.line)
        if row.stamp is not None:
            self._times.append(row.stamp.value)
            self._clocks.append(row.stamp.key)
        elif self._untimed is None:
            self._untimed = row.line
        if row.talk is not None:
            self._talks.append(row.talk)

    def trace(self, path: Path, sha256: str, units: Mapping[str, float]) -> Trace:
        """The trace, with times in `units` of seconds by column. Raises TraceError."""
        if not len(self):
            raise TraceError(f"{path} has no requests")
        timed = len(self._clocks)
        if timed and self._untimed is not None:
            raise TraceError(
                f"{path} line {self._untimed} has no time, but others have; give times to all requests or to "
                "none"
            )
        scales = np.fromiter((units[key] for key in self._clocks), float, timed)
        try:
            return numbered_trace(
                self._blocks,
                np.asarray(self._times) * scales if timed else None,
                name=path.name,
                sha256=sha256,
                lines=self._lines,
                talks=self._talks if len(self._talks) == len(self) else None,
            )
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from error


def _opened(path: Path) -> tuple[str, Iterator[_Row]]:
    """The SHA-256 of the content of a file, and its requests."""
    content = content_of(path, _WANTED)
    return hashlib.sha256(content).hexdigest(), _rows(path, content)


def _rows(path: Path, content: bytes | bytearray) -> Iterator[_Row]:
    named = (_DATE.sub("", suffix).lower() for suffix in path.suffixes)  # of rotated logs
    suffixes = [suffix for suffix in named if suffix != ".gz" and not suffix[1:].isdecimal()]
    suffix = suffixes[-1] if suffixes else ""
    if suffix == ".parquet":
        yield from _of_records(path, enumerate(_parquet(path, content), start=1))
        return
    text = text_of(path, content, _WANTED)
    del content  # the text takes as much memory again
    if suffix in (".jsonl", ".json", ".ndjson"):
        yield from _of_records(path, _json_lines(path, text), json=True)
    elif suffix == ".csv":
        yield from _of_records(path, _csv(path, text))
    elif suffix == ".txt":
        for number, line in enumerate(lines_of(text), start=1):
            if line.strip():
                yield _Row(number, _names(line.split()))
    else:
        raise TraceError(f"{path}: unknown format {suffix or 'without a suffix'}; give {_SUFFIXES}")


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file, with their lines. Raises TraceError for anything else."""
    for number, line in enumerate(lines_of(text), start=1):
        if line.strip():
            yield number, json_object(line, f"{path} line {number}")


def _csv(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a table by column, with their lines. Raises TraceError for rows of other lengths."""
    usual = csv.field_size_limit()  # of the whole process
    csv.field_size_limit(max(usual, len(text)))  # a field has all blocks of a request
    try:
        table = csv.DictReader(line.group() for line in _CSV_LINE.finditer(text))
        for record in table:
            if None in record:
                raise TraceError(
                    f"{path} line {table.line_num} has more fields than the header: separate blocks by "
                    "blanks, or put them in quotation marks"
                )
            yield table.line_num, record
    finally:
        csv.field_size_limit(usual)


def _of_records(
    path: Path, records: Iterable[tuple[int, dict[str, Any]]], *, json: bool = False
) -> Iterator[_Row]:
    """The content of rows of a table, or of JSON lines, which may have conversations."""
    same_size = _SameSize()
    for number, record in records:
        where = f"{path} line {number}"
        same_size.check(record, where)
        blocks, stamp = _blocks(record, where), _stamp(record, where, json=json)
        yield _Row(number, blocks, stamp, _talk(record, where) if json else None)


def _in_seconds(stamp: _Stamp | None) -> bool:
    """Whether timestamps are seconds, as Qwen-Bailian's, because this one has fractions: not milliseconds."""
    return stamp is not None and stamp.key == _STAMP and stamp.fractions


class _SameSize:
    """Checks that all blocks of a trace have the same size, if it states sizes."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[Any, str]] = {}

    def check(self, record: dict[str, Any], where: str) -> None:
        """Raises TraceError for a line whose block size differs from earlier ones."""
        for key in _BLOCK_SIZES:
            if record.get(key) is not None:
                size, line = self._first.setdefault(key, (record[key], where))
                if size != record[key]:
                    raise TraceError(
                        f"{where}: {key} is {record[key]!r}, {size!r} in line {line.rpartition(' ')[2]}; "
                        "all blocks must be of one size: cut the larger ones up"
                    )


def _blocks(record: dict[str, Any], where: str) -> list[int | str]:
    key = next((key for key in _BLOCKS if record.get(key) is not None), None)
    if key is None:
        raise TraceError(
            f"{where} has no blocks: none of {', '.join(_BLOCKS)} among {', '.join(map(str, record))}"
        )
    value = record[key]
    if isinstance(value, str):
        parts: Sequence[Any] = value.strip("[]").replace(",", " ").split()
    else:
        parts = value if isinstance(value, list) else [value]
    kinds = {*map(type, parts)}
    if not kinds <= {int, str}:
        wrong = next(part for part in parts if type(part) not in (int, str))
        raise TraceError(f"{where}: {key} holds {wrong!r}; blocks are whole numbers or text")
    return _names(parts) if str in kinds else [*parts]


def _names(parts: Sequence[int | str]) -> list[int | str]:
    """Identifiers, as numbers where they are written as such: `BlockNumbering` keeps those in an array.

    What is written otherwise, such as 007, is another identifier than 7.
    """
    return [
        number
        if isinstance(part, str)
        and len(part) <= _DIGITS
        and part.removeprefix("-").isdecimal()
        and str(number := int(part)) == part
        else part
        for part in parts
    ]


def _stamp(record: dict[str, Any], where: str, *, json: bool) -> _Stamp | None:
    key = next((key for key in _TIMES if record.get(key) not in (None, "")), None)
    if key is None:
        return None
    try:
        value = float(record[key])
    except (TypeError, ValueError, OverflowError):
        raise TraceError(f"{where}: {key} is {str(record[key])[:60]!r}, not a number") from None
    if not math.isfinite(value):
        raise TraceError(f"{where}: {key} is {record[key]!r}; times must be finite")
    # in a table, a column of whole numbers may have become floats, as where some were missing
    return _Stamp(key, value, not value.is_integer() or (json and isinstance(record[key], float)))


def _talk(record: dict[str, Any], where: str) -> Talk | None:
    """The conversation that `Talk.to_row` wrote, if any. Raises TraceError for invalid fields."""
    if "prompts" not in record:
        return None
    texts, goes_on = record["prompts"], record.get("goes_on")
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        raise TraceError(
            f"{where}: prompts is {str(texts)[:60]!r}; it must be a list of texts, the newest last"
        )
    numbers = []
    for key in ("conversation", "turn"):
        value = record.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TraceError(f"{where}: {key} is {value!r}; next to prompts it must be a whole number")
        numbers.append(value)
    if goes_on is not None and not isinstance(goes_on, bool):
        raise TraceError(f"{where}: goes_on is {goes_on!r}; it must be true or false, or be left out")
    return Talk(numbers[0], Prompts(tuple(texts), numbers[1]), goes_on)


def _parquet(path: Path, content: bytes | bytearray) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise TraceError(
            f"{path}: reading Parquet needs pyarrow: pip install 'gati[evict]', or give JSON lines"
        ) from None
    try:
        for batch in parquet.ParquetFile(io.BytesIO(content)).iter_batches(_AT_ONCE):
            yield from batch.to_pylist()
    except Exception as error:  # pyarrow's errors have no common base class
        raise TraceError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from error
