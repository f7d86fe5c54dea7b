"""Listing folders of inputs: one folder per class, or files without classes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from gati.errors import DataError


def class_folders(folder: Path) -> list[Path]:
    """The folders of a folder's classes, sorted by name. Raises `OSError` if one of them cannot be listed."""
    found = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for each in found:
        next(each.iterdir(), None)  # `Path.glob` passes over folders without a word
    return found


def files_with(suffixes: Collection[str], folder: Path, pattern: str) -> list[Path]:
    """The files of a folder that match a pattern and have one of these lower-case suffixes, sorted."""
    return sorted(path for path in folder.glob(pattern) if path.suffix.lower() in suffixes and path.is_file())


@contextmanager
def readable(place: Path, what: str) -> Iterator[None]:
    """Inside the context, `OSError` becomes a `DataError` that names the file or folder in question."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{what}: cannot read {error.filename or place} ({error.strerror}); check its permissions"
        ) from error
