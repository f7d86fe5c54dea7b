"""Listing folders of inputs: one folder per class, or files without classes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from gati.errors import DataError

# What macOS puts into archives next to files, under their names.
_MAC_FOLDER, _MAC_PREFIX = "__MACOSX", "._"


def class_folders(folder: Path) -> list[Path]:
    """The folders of a folder's classes, sorted by name. Raises `OSError` if `folder` cannot be listed."""
    names = (entry for entry in folder.iterdir() if entry.is_dir() and entry.name != _MAC_FOLDER)
    return sorted(entry for entry in names if not entry.name.startswith("."))


def files_with(suffixes: Collection[str], folder: Path, *, nested: bool) -> list[Path]:
    """The files of a folder that have one of these lower-case suffixes, sorted; `nested`: at any depth.

    Raises `OSError` if a folder cannot be listed, which `Path.glob` passes over without a word.
    """
    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        wanted = (name for name in names if Path(name).suffix.lower() in suffixes)
        found += [Path(parent, name) for name in wanted if not name.startswith(_MAC_PREFIX)]
        if not nested:
            folders.clear()
    return sorted(path for path in found if path.is_file())


def _raise(error: OSError) -> None:
    raise error


@contextmanager
def readable(place: Path, what: str) -> Iterator[None]:
    """Inside the context, `OSError` becomes a `DataError` that names the file or folder in question."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{what}: cannot read {error.filename or place} ({error.strerror}); check its permissions"
        ) from error
