"""Writing files so that a crash leaves either the old one or the new one, never half of one.

Also the names of networks and data that are files, made absolute.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from gati.errors import StorageError

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # as Rust writes it
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{8}\.part")
_DAY_S = 86_400.0
_MOST_LINKS = 40  # as in Linux; more are a loop


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file next to `path`, flush it to disk, then rename it into place.

    The file keeps the permissions of the old one; a new one has those of the user's umask. A symbolic link
    stays one: what it leads to is written. A device or pipe is written to directly; to an open file of this
    process, such as `/dev/stdout`, the text is added where its next output would be.

    **Raises:** `StorageError` when the disk is full or the folder is not writable.
    """
    try:
        if (descriptor := _own_descriptor(path)) is not None:
            _add_to(descriptor, write)
            return
        if path.exists() and not path.is_file() and not path.is_dir():
            write(path)
            return
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = unfinished(path)
        old: int | None = None
        with contextlib.suppress(FileNotFoundError):
            old = stat.S_IMODE(path.stat().st_mode)
        first = 0o666 if old is None else 0o600 | (0o666 & old)  # never open to more than the old file is
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, first)  # less the umask
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode) if old is None else old
        os.close(descriptor)
        try:
            write(temporary)
            with open(temporary, "rb+") as handle:
                os.fsync(handle.fileno())
            if stat.S_IMODE(temporary.stat().st_mode) != mode:  # some writers put another file there
                os.chmod(temporary, mode)
            os.replace(temporary, path)
            _flush_folder(path.parent)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError as error:
        raise _storage_error(path, error) from error
    except Exception as error:  # that of safetensors has the system's error only in its message
        found = _SYSTEM_ERROR.search(str(error))
        if found is None:
            raise
        code = int(found[1])
        raise _storage_error(path, OSError(code, os.strerror(code))) from error


def unfinished(path: Path) -> Path:
    """A new name next to `path` for what becomes it once it is complete."""
    return path.parent / f".{path.name}.{uuid4().hex[:8]}.part"


def remove_unfinished(folder: Path) -> None:
    """Remove files in `folder` whose writing was killed, as far as that is possible: those over a day old."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # a folder, or gone meanwhile
                if _UNFINISHED.fullmatch(path.name) and time.time() - path.lstat().st_mtime > _DAY_S:
                    path.unlink()


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`, atomically. Raises `StorageError` like `atomic_write`."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, atomically. Raises `StorageError` like `atomic_write`."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    atomic_write(path, write)


def is_file(path: Path) -> bool:
    """Whether a file is at `path`. Raises `StorageError` if that cannot be told, as in a closed folder."""
    try:
        return stat.S_ISREG(mode_of(path))
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror}; check the disk and the permissions"
        ) from error


def mode_of(path: Path) -> int:
    """The mode of what is at `path`, for `stat.S_ISDIR` and its like; 0 if nothing is, or can be, there.

    **Raises:** OSError if that cannot be told, which the functions of `os.path` take for a no.
    """
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last for names that none can have
        return 0
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # none can have this one, either
            return 0
        raise


def lasting_source(source: Any, folder: Path = Path()) -> str:
    """The name of a source of a network or of data, with an absolute path: it is found from any folder.

    Relative paths are relative to `folder`. So `nets.py:build`, `net.pt2` and any existing file or folder
    change; `timm:NAME`, `package.module:callable` and objects do not.
    """
    text = str(source)
    if not isinstance(source, str | Path):
        return text
    place, colon, name = text.rpartition(":")
    if place.endswith(".py"):
        return f"{absolute(folder / place)}{colon}{name}"
    path = folder / text
    return str(absolute(path)) if text.endswith(".pt2") or path.exists() else text


def absolute(path: Path) -> Path:
    """The real path of a file or folder; that of a link itself if only its name tells what the file is.

    In the caches of Hugging Face and DVC, files are links to others with a hash for a name.
    """
    real = Path(os.path.realpath(path))  # that of pathlib raises an error for links in a circle
    if path.is_dir() or path.suffix in ("", real.suffix):
        return real
    return Path(os.path.realpath(path.parent), path.name)


def is_standard_output(path: Path) -> bool:
    """Whether a path such as `/dev/stdout` leads to the standard output of this process."""
    return _own_descriptor(path) == 1


def _own_descriptor(path: Path) -> int | None:
    """The number of the open file of this process that a path like `/dev/stdout` or `/dev/fd/63` leads to.

    Such a path names no file that can be replaced: a pipe has no name, and with `> FILE` the shell would go
    on writing to the old file.
    """
    own = (os.path.realpath("/proc/self/fd"), "/dev/fd")  # the second is no link on macOS
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(path.parent)
        if folder in own and path.name.isdecimal():
            return int(path.name)
        path = Path(folder, path.name)
        if not os.path.islink(path):  # Path.is_symlink raises where this user may not look
            return None
        path = Path(folder, os.readlink(path))
    return None


def _add_to(descriptor: int, write: Callable[[Path], None]) -> None:
    """Copy what `write` puts into a file to a descriptor: opened by name, a file would be emptied first."""
    if descriptor == 1 and sys.stdout is not None:
        sys.stdout.flush()  # what was printed before comes before
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / "output"
        write(temporary)
        with temporary.open("rb") as source, os.fdopen(os.dup(descriptor), "wb") as target:
            shutil.copyfileobj(source, target)


def _flush_folder(folder: Path) -> None:
    """Have the disk keep what a folder lists, where the system can be told so."""
    with contextlib.suppress(OSError, AttributeError):  # not on Windows, nor on every network file system
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _storage_error(path: Path, error: OSError) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"disk full while writing {path}: free some space and run the command again")
    if error.errno == errno.EISDIR:
        return StorageError(f"cannot write {path}: it is a folder; give the name of a file")
    return StorageError(f"cannot write {path}: {error.strerror or error}; choose a folder you may write to")
