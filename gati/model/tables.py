"""Tables with a column of texts and one of classes: CSV, optionally gzipped, and Parquet."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import DataError, one_line

_SUFFIXES = (".csv", ".csv.gz", ".parquet")
_LABELS = "label"  # the default column, if it exists
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

    **Raises:** `DataError` for a file that is missing, damaged, empty or not UTF-8, a missing column, rows
    without text or class, or classes that are numbers but not integers from 0.
    """
    where = f"{what}: {path}"
    if not path.is_file():
        raise DataError(f"{what}: no file {path}; check the path")
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
            found = "is empty" if text is None or isinstance(text, str) else f"holds a {type(text).__name__}"
            raise DataError(f"{where}: `{text_column}` of row {row} {found}; remove that row")
    return TextTable(texts, *_classes(columns.get(label_column or _LABELS), where))


def _missing(where: str, wanted: str, columns: dict[str, Any], option: str) -> DataError:
    return DataError(
        f"{where} has no column `{wanted}` (columns: {', '.join(columns) or 'none'}); name it with {option}"
    )


def _read_csv(path: Path, wanted: Sequence[str], where: str) -> dict[str, list[Any] | None]:
    """All columns by name; those that are not wanted are None."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns: dict[str, list[Any] | None] = {str(name): None for name in reader.fieldnames or ()}
            kept: dict[str, list[Any]] = {name: [] for name in wanted if name in columns}
            for row in reader:
                for name, values in kept.items():
                    values.append(row[name])
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 ({one_line(error)}); convert it, as with iconv") from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f"{where} is not valid CSV ({one_line(error)}); write or copy it again") from error
    return {**columns, **kept}


def _read_parquet(path: Path, wanted: Sequence[str], where: str) -> dict[str, list[Any] | None]:
    if find_spec("pyarrow") is None:
        raise DataError(f"reading {path} needs pyarrow: pip install 'gati[text]', or convert it to CSV")
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns: dict[str, list[Any] | None] = dict.fromkeys(file.schema_arrow.names)
            kept = [name for name in wanted if name in columns]
            read = file.read(columns=kept)
            return {**columns, **{name: read.column(name).to_pylist() for name in kept}}
    except UnicodeDecodeError as error:
        raise DataError(f"{where} has text that is not UTF-8; write it again") from error
    except (ArrowException, OSError) as error:
        raise DataError(f"{where} is not valid Parquet ({one_line(error)}); copy it again") from error


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
