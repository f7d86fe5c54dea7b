"""The folder `graphs/` of a library: networks that engines open, and quantised lookups for later commands.

Files are named by a hash of what they were made from, so several compositions, commands and versions of Gati
share the folder. Networks whose own answers were counted are named by their content, which the composition
records, and their exits: no later command replaces them. Whoever reads a file gives it the present time. What
no composition needs and nothing has read for a month is removed when the next composition is written.

So a network that another command has just stored for a composition that it has yet to write stays. Other
versions of Gati and torch use other names, so what was read since the oldest composition was saved stays as
well. A file that is gone is made again, except a network that a composition records.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

from gati.errors import StorageError
from gati.files import atomic_write_bytes

UNUSED_S = 30 * 86_400.0
_COMPOSING_S = 86_400.0  # networks are stored before their composition is saved
# networks, also for shorter inputs; quantised lookups; and what a killed command was writing
_OURS = re.compile(r"([0-9a-f]{16})(-\d+)?\.(onnx|zip)|lookup-[0-9a-f]{16}\.onnx|\.\S+\.part")


def graph_folder(library: Path) -> Path:
    """The folder in the directory `library`."""
    return library / "graphs"


def store_graphs(folder: Path, graphs: Mapping[Path, bytes]) -> None:
    """Write networks to their files in the folder. Raises StorageError."""
    try:
        folder.mkdir(exist_ok=True)
        with _locked(folder):
            for path, content in graphs.items():
                atomic_write_bytes(path, content)
    except OSError as error:
        raise StorageError(
            f"cannot write {folder}: {error.strerror or error}; choose a library you may write to"
        ) from error


def remove_unused_graphs(
    folder: Path, needed: Collection[str], *, saved_s: float = inf, now_s: float | None = None
) -> None:
    """Remove files that nothing has read for `UNUSED_S`, except networks whose hash is in `needed`.

    `saved_s` is the time at which the oldest composition was saved: what was stored or read after that, or in
    the day before, stays. `now_s` is the time of day, the present one if None.
    """
    now_s = time.time() if now_s is None else now_s
    oldest_s = min(now_s - UNUSED_S, saved_s - _COMPOSING_S)
    with suppress(OSError), _locked(folder):  # there may be none, or it may be read-only
        for path in folder.iterdir():
            ours = _OURS.fullmatch(path.name)
            if ours is not None and ours[1] not in needed and path.lstat().st_mtime < oldest_s:
                path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: no file is removed while another one takes its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
