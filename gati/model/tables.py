"""Tables with a column of texts and one of classes: CSV, optionally gzipped, and Parquet."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import DataError, one_line
from gati.files import is_file

_SUFFIXES = (".csv", ".csv.gz", ".parquet")
_LABELS = "label"  # the default column, if it exists
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_DIGITS = 9  # of the largest class number; if some are longer, they are codes, and count as names
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|nan", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class TextTable:
    """Texts with their labels int64 [N], if any; `class_names` if the labels were not numbers."""

    texts: list[str]
    labels: NDArray[np.int64] | None
    class_names: tuple[str, ...] | None


def is_table(path: str | Path) -> bool:
    """Whether a path has the suffix of a table."""
    return str(path).lower().endswith(_SUFFIXES)


def read_texts(path: Path, text_column: str, label_column: str | None, what: str) -> TextTable:
    """Read the texts of a table, and the classes in `label_column`, by default `label` if it exists.

    Integer classes are kept, also if written as `3.0`; names are numbered in sorted order. `what` begins the
    messages.

    **Raises:** `DataError` for a file that is missing, damaged, empty or not UTF-8, a column that is missing
    or there twice, rows with too many fields or without text or class, or classes that are numbers but not
    integers from 0.
    """
    where = f"{what}: {path}"
    _check_there(path, what)
    read = _read_parquet if path.suffix.lower() == ".parquet" else _read_csv
    columns = read(path, (text_column, label_column or _LABELS), where)
    texts = columns.get(text_column)
    if texts is None:
        raise _missing(where, text_column, columns, "--text-column")
    if label_column is not None and columns.get(label_column) is None:
        raise _missing(where, label_column, columns, "--label-column")
    if not texts:
        raise DataError(f"{where} is empty; give at least a few hundred texts")
    for row, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            is_empty = text is None or isinstance(text, str)
            found = "is empty; remove that row" if is_empty else f"is a {type(text).__name__}; write strings"
            raise DataError(f"{where}: `{text_column}` of row {row} {found}")
    return TextTable(texts, *_classes(columns.get(label_column or _LABELS), where))


def check_table(path: Path, what: str) -> None:
    """Raise `DataError` for a table that is missing, or that holds pictures instead of texts."""
    _check_there(path, what)
    if path.suffix.lower() != ".parquet" or find_spec("pyarrow") is None:
        return
    from pyarrow import ArrowException, parquet, types

    try:
        schema = parquet.read_schema(path)
    except (ArrowException, OSError) as error:
        raise _damaged_parquet(f"{what}: {path}", error) from error
    for field in schema:
        content = field.type
        if types.is_struct(content) and content.get_field_index("bytes") >= 0:  # as Hugging Face writes them
            content = content.field("bytes").type
        if types.is_binary(content) or types.is_large_binary(content):
            raise DataError(
                f"{what}: column `{field.name}` of {path} holds pictures or other files; write them to a "
                "folder of one folder per class, or give a package.module:callable that returns a Dataset"
            )


def _check_there(path: Path, what: str) -> None:
    if not is_file(path):
        raise DataError(f"{what}: no file {path}; check the path")


def _damaged_parquet(where: str, error: Exception) -> DataError:
    return DataError(f"{where} is not valid Parquet ({one_line(error)}); copy it again")


def _missing(where: str, wanted: str, columns: dict[str, Any], option: str) -> DataError:
    return DataError(
        f"{where} has no column `{wanted}` (columns: {', '.join(columns) or 'none'}); name it with {option}"
    )


def _read_csv(path: Path, wanted: Sequence[str], where: str) -> dict[str, list[Any] | None]:
    """All columns by name; those that are not wanted are None."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            return _columns_of(file, wanted, where)
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 ({one_line(error)}); convert it, as with iconv") from error
    except (csv.Error, OSError, EOFError, zlib.error) as error:
        if "field larger" not in str(error):
            raise DataError(
                f"{where} is not valid CSV ({one_line(error)}); write or copy it again"
            ) from error
        raise DataError(
            f"{where}: a field has more than {csv.field_size_limit()} characters; close its double quote, or "
            "cut that text"
        ) from error


def _columns_of(file: Iterable[str], wanted: Sequence[str], where: str) -> dict[str, list[Any] | None]:
    lines: list[str] = []  # of the row that is being read
    noted = _noted(file, lines)
    header = _header(noted)
    named = any(name in wanted for name in header if name != name.strip())  # by the user, with the spaces
    spaced = not named and any(name.startswith(" ") for name in header)  # after commas, and so in all rows
    names = header if named else [name.strip() for name in _header(lines, skipinitialspace=spaced)]
    reader = csv.DictReader(noted, names, skipinitialspace=spaced)
    _check_separator(names, wanted[0], where)
    _check_once(names, wanted, where)
    kept: dict[str, list[Any]] = {name: [] for name in wanted if name in names}
    last: list[str] = []
    lines.clear()
    for number, row in enumerate(reader):
        if any(row.get(None) or ()):
            raise DataError(
                f"{where}: row {number} has more fields than the header; put texts that hold commas "
                "into double quotes"
            )
        for name, values in kept.items():
            values.append(row[name])
        last, lines[:] = lines.copy(), ()
    last = [line for line in last if line.strip()]  # no row, before the last one
    if len(last) > 1 and "".join(last).count('"') % 2:
        raise DataError(
            f"{where}: a double quote in the last {len(last)} lines is not closed, so they are one "
            "row; close it, or double it if it belongs to the text"
        )
    return {**dict.fromkeys(names), **kept}


def _header(lines: Iterable[str], *, skipinitialspace: bool = False) -> list[str]:
    """The first row that is not blank; empty if there is none."""
    rows = csv.reader(lines, skipinitialspace=skipinitialspace)
    return next((row for row in rows if any(map(str.strip, row))), [])


def _check_separator(columns: Sequence[str], text_column: str, where: str) -> None:
    """Raise `DataError` for a header whose names, that of the texts among them, are not between commas."""
    for sign, signs in _OTHER_SEPARATORS.items():
        names = [name.strip('" ') for name in columns[0].split(sign)] if len(columns) == 1 else []
        if len(names) > 1 and text_column in names:
            raise DataError(f"{where} has {signs} between its columns; write it with commas")


def _check_once(columns: Sequence[str], wanted: Sequence[str], where: str) -> None:
    """Raise `DataError` if several columns have one of the wanted names: which of them is meant?"""
    for name in wanted:
        if columns.count(name) > 1:
            raise DataError(
                f"{where} has {columns.count(name)} columns `{name}`; rename or remove all but one"
            )


def _noted(file: Iterable[str], lines: list[str]) -> Iterator[str]:
    """The lines of a file, each added to `lines` as it is read."""
    for line in file:
        lines.append(line)
        yield line


def _read_parquet(path: Path, wanted: Sequence[str], where: str) -> dict[str, list[Any] | None]:
    if find_spec("pyarrow") is None:
        raise DataError(f"reading {path} needs pyarrow: pip install 'gati[text]', or convert it to CSV")
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            _check_once(file.schema_arrow.names, wanted, where)
            columns: dict[str, list[Any] | None] = dict.fromkeys(file.schema_arrow.names)
            kept = [name for name in wanted if name in columns]
            read = file.read(columns=kept)
            return {**columns, **{name: read.column(name).to_pylist() for name in kept}}
    except UnicodeDecodeError as error:
        raise DataError(f"{where} has text that is not UTF-8; write it again") from error
    except (ArrowException, OSError) as error:
        raise _damaged_parquet(where, error) from error
    except ValueError as error:  # of times to the nanosecond, which Python does not have
        raise DataError(
            f"{where} has values that cannot be read ({one_line(error)}); write texts as strings, and "
            "classes as numbers or names"
        ) from error


def _classes(values: list[Any] | None, where: str) -> tuple[NDArray[np.int64] | None, tuple[str, ...] | None]:
    if values is None:
        return None, None
    for row, value in enumerate(values):
        if value is None or value != value or (isinstance(value, str) and not value.strip()):
            raise DataError(f"{where}: row {row} has no label; give it one, or remove the row")
    words = [str(value).strip() for value in values]
    if all(word.isascii() and word.isdecimal() for word in words):
        if max(map(len, words)) <= _DIGITS:
            return np.array([int(word) for word in words], dtype=np.int64), None
    elif all(map(_NUMBER.fullmatch, words)):
        return np.array([_whole(word, row, where) for row, word in enumerate(words)], dtype=np.int64), None
    names = sorted(set(words))
    places = {name: number for number, name in enumerate(names)}
    return np.array([places[word] for word in words], dtype=np.int64), tuple(names)


def _whole(word: str, row: int, where: str) -> int:
    """The class number in `3.0`, as pandas writes integers of a column that once had a gap."""
    number = float(word)
    if not number.is_integer() or not 0 <= number < 10**_DIGITS:
        raise DataError(
            f"{where}: row {row} has the label {word}; give integer class numbers from 0, or names"
        )
    return int(number)
