"""Writing files so that a crash leaves either the old one or the new one, never half of one.

Also the names of networks and data that are files, made absolute.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gati.errors import StorageError

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # as Rust writes it


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file next to `path`, flush it to disk, then rename it into place.

    A symbolic link stays one: what it leads to is written. A device or pipe is written to directly.

    **Raises:** `StorageError` when the disk is full or the folder is not writable.
    """
    path = Path(os.path.realpath(path))
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            write(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(descriptor)
        try:
            write(Path(temporary))
            with open(temporary, "rb+") as handle:
                os.fsync(handle.fileno())
            os.chmod(temporary, 0o644)
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


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`, atomically. Raises `StorageError` like `atomic_write`."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, atomically. Raises `StorageError` like `atomic_write`."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    atomic_write(path, write)


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
        return f"{(folder / place).resolve()}{colon}{name}"
    path = folder / text
    return str(path.resolve()) if text.endswith(".pt2") or path.exists() else text


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
    return StorageError(f"cannot write {path}: {error.strerror or error}; choose a folder you may write to")
