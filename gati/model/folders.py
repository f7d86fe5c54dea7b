"""Listing folders of inputs: one folder per class, or files without classes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from gati.errors import DataError

# What macOS puts into archives next to files, under their names.
_MAC_FOLDER, _MAC_PREFIX = "__MACOSX", "._"
_OF_LINKS = (errno.ENOENT, errno.ELOOP)


def class_folders(folder: Path) -> list[Path]:
    """The folders of a folder's classes, sorted by name. Raises `OSError` as `files_with`."""
    shown = (entry for entry in folder.iterdir() if entry.name != _MAC_FOLDER and entry.name[0] != ".")
    return sorted(entry for entry in shown if stat.S_ISDIR(entry.stat().st_mode))


def files_with(suffixes: Collection[str], folder: Path, *, nested: bool) -> list[Path]:
    """The files of a folder that have one of these lower-case suffixes, sorted; `nested`: at any depth.

    Links are followed. Raises `OSError` for one that leads nowhere, and if a folder cannot be listed, which
    `Path.glob` passes over without a word.
    """
    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        wanted = (name for name in names if Path(name).suffix.lower() in suffixes)
        found += [Path(parent, name) for name in wanted if not name.startswith(_MAC_PREFIX)]
        if not nested:
            folders.clear()
        for name in folders:
            _check_leads_elsewhere(Path(parent, name))
    return sorted(path for path in found if stat.S_ISREG(path.stat().st_mode))


def _check_leads_elsewhere(folder: Path) -> None:
    """Raise `OSError` for a link to a folder that holds it: what is there would be found again and again."""
    if folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve()):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))


def _raise(error: OSError) -> None:
    raise error


@contextmanager
def readable(place: Path, what: str) -> Iterator[None]:
    """Inside the context, `OSError` becomes a `DataError` that names the file or folder in question."""
    try:
        yield
    except OSError as error:
        what_to_do = "check where links lead" if error.errno in _OF_LINKS else "check its permissions"
        raise DataError(
            f"{what}: cannot read {error.filename or place} ({error.strerror}); {what_to_do}"
        ) from error
