"""Listing folders of inputs: one folder per class, or files without classes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from gati.errors import DataError, GatiError
from gati.files import mode_of

# What macOS puts into archives next to files, under their names.
_MAC_FOLDER, _MAC_PREFIX = "__MACOSX", "._"
_OF_LINKS = (errno.ENOENT, errno.ELOOP)


class Listing(NamedTuple):
    """The files of a folder, sorted, the names of its class folders, if any, and the number of each file's.

    `note` says which files were passed over although they may be inputs, or is empty.
    """

    files: list[Path]
    classes: list[str]
    numbers: list[int]
    note: str


def list_files(folder: Path, suffixes: Collection[str], others: Collection[str], what: str) -> Listing:
    """The files with one of `suffixes` in the class folders of `folder`, or, if there are none, in itself.

    `others` are the suffixes of inputs that cannot be read. Raises `DataError` for what cannot be listed.
    """
    wanted = {*suffixes, *others}
    with readable(folder, what):
        classes = class_folders(folder)
        inside = [
            (path, number)
            for number, each in enumerate(classes)
            for path in files_with(wanted, each, nested=True)
        ]
        loose = [(path, -1) for path in files_with(wanted, folder, nested=False)]
    found, loose_ones = (
        [(path, number) for path, number in listed if path.suffix.lower() in suffixes]
        for listed in (inside, loose)
    )
    left_out = [path for path, _ in (*inside, *loose) if path.suffix.lower() not in suffixes]
    if found:
        left_out = [*(path for path, _ in loose_ones), *left_out]
    else:
        found = loose_ones
    return Listing(
        [path for path, _ in found],
        [each.name for each in classes] if found and found[0][1] >= 0 else [],
        [number for _, number in found],
        _note(folder, left_out, suffixes),
    )


def _note(folder: Path, left_out: Sequence[Path], suffixes: Collection[str]) -> str:
    if not left_out:
        return ""
    first = left_out[0]
    why = "is not in a class folder" if first.suffix.lower() in suffixes else "is in a format not read here"
    return f"files left out of {folder.name}: {len(left_out)}, such as {first.name}, which {why}"


def class_folders(folder: Path) -> list[Path]:
    """The folders of a folder's classes, sorted by name. Raises `OSError` as `files_with`."""
    shown = (entry for entry in folder.iterdir() if entry.name != _MAC_FOLDER and entry.name[0] != ".")
    return sorted(entry for entry in shown if stat.S_ISDIR(entry.stat().st_mode))


def files_with(suffixes: Collection[str], folder: Path, *, nested: bool) -> list[Path]:
    """The files of a folder that have one of these lower-case suffixes, sorted; `nested`: at any depth.

    Links are followed. Raises `OSError` for one that leads round in a circle, for one that leads nowhere,
    unless its name begins with a dot, and if a folder cannot be listed, which `Path.glob` passes over without
    a word.
    """
    return sorted(_found(suffixes, (folder,), nested))


def _found(suffixes: Collection[str], walked: tuple[Path, ...], nested: bool) -> Iterator[Path]:
    """The files in the last of the `walked` folders, each of which is in the one before it."""
    with os.scandir(walked[-1]) as entries:
        for entry in entries:
            path, is_link = Path(entry.path), entry.is_symlink()
            wanted = path.suffix.lower() in suffixes and not entry.name.startswith(_MAC_PREFIX)
            if is_link and not entry.name.startswith("."):
                entry.stat()  # raises where it leads nowhere; the questions below answer no to that
            if entry.is_dir():
                if nested and is_link:
                    _check_leads_elsewhere(path, walked)
                if nested:
                    yield from _found(suffixes, (*walked, path), nested)
            elif wanted and entry.is_file():
                yield path


def _check_leads_elsewhere(link: Path, walked: tuple[Path, ...]) -> None:
    """Raise `OSError` if the link's target holds one of the `walked` folders, which would never end."""
    target = link.resolve()
    if any(folder.resolve().is_relative_to(target) for folder in walked):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(link))


def is_folder(place: Path, what: str, refusal: type[GatiError] = DataError) -> bool:
    """Whether a folder is there. Raises `refusal` if what is there is closed to this user."""
    with readable(place, what, refusal):
        return stat.S_ISDIR(mode_of(place))


@contextmanager
def readable(place: Path, what: str, refusal: type[GatiError] = DataError) -> Iterator[None]:
    """Inside the context, `OSError` becomes a `refusal` that names the file or folder in question."""
    try:
        yield
    except OSError as error:
        what_to_do = "check where links lead" if error.errno in _OF_LINKS else "check its permissions"
        raise refusal(
            f"{what}: cannot read {error.filename or place} ({error.strerror}); {what_to_do}"
        ) from error
