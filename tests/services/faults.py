"""Faults for real processes: kills, stops, cut connections, full disks, bad input; and leak checks.

Every fault is a function or a context manager that undoes it, for any process of this user; nothing is
patched in the process that is tested. `Census` counts what a process holds.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Census",
    "JumpingClock",
    "alive",
    "census",
    "cut",
    "disk_full",
    "gone",
    "half_sent",
    "killed",
    "no_files_left",
    "stopped",
    "trickled",
]

Place = tuple[str, int]


# Processes ----------------------------------------------------------------------------------------------


def killed(pid: int) -> None:
    """End a process as the system does when memory is short."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes that do nothing, and hold on to what they have, until the block ends."""
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return _status(pid)["State"][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def disk_full(*pids: int) -> Iterator[None]:
    """Processes of which no write to a file succeeds; sockets and pipes go on."""
    with _limited(resource.RLIMIT_FSIZE, {pid: 0 for pid in pids}):
        yield


@contextmanager
def no_files_left(pid: int, more: int = 0) -> Iterator[None]:
    """A process that may open only so many more files and connections."""
    with _limited(resource.RLIMIT_NOFILE, {pid: max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1 + more}):
        yield


@contextmanager
def _limited(kind: int, limits: dict[int, int]) -> Iterator[None]:
    before = {}
    try:
        for pid, limit in limits.items():
            with contextlib.suppress(ProcessLookupError):
                before[pid] = resource.prlimit(pid, kind)
                resource.prlimit(pid, kind, (limit, before[pid][1]))
        yield
    finally:
        for pid, limit_before in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, kind, limit_before)


# Files and time -----------------------------------------------------------------------------------------


@contextmanager
def gone(path: Path) -> Iterator[None]:
    """A file or folder that is not there until the block ends; what was put in its place goes."""
    away = path.with_name(f"{path.name}.away")
    path.rename(away)
    try:
        yield
    finally:
        if path.is_dir():
            for each in sorted(path.rglob("*"), reverse=True):
                each.rmdir() if each.is_dir() else each.unlink()
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        away.rename(path)


class JumpingClock:
    """The time of day of Python processes whose PYTHONPATH begins with `folder`; `time.monotonic` goes on.

    Close it when they have ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "offset").write_bytes(bytes(8))
        (folder / "sitecustomize.py").write_text(_CLOCK.format(str(folder / "offset")), encoding="utf-8")
        with (folder / "offset").open("rb+") as file:
            self._offset = mmap.mmap(file.fileno(), 8)

    def jump(self, seconds: float) -> None:
        """Have it so many seconds later from now on, or earlier."""
        self._offset[:] = struct.pack("d", struct.unpack("d", self._offset)[0] + seconds)

    def close(self) -> None:
        """Let go of the file."""
        self._offset.close()


_CLOCK = """
import mmap, struct, time
with open({!r}, "rb") as _file:
    _offset = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + struct.unpack("d", _offset)[0]
time.time_ns = lambda: _time_ns() + int(1e9 * struct.unpack("d", _offset)[0])
"""


# Connections --------------------------------------------------------------------------------------------


def cut(place: Place, data: bytes) -> None:
    """Send some bytes, and end the connection without a farewell."""
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=5.0) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(data)


@contextmanager
def half_sent(place: Place, beginnings: Sequence[bytes]) -> Iterator[list[socket.socket]]:
    """Connections that send this much each, and then nothing, until the block ends."""
    with contextlib.ExitStack() as stack:
        opened = []
        for beginning in beginnings:
            with contextlib.suppress(OSError):
                connection = stack.enter_context(socket.create_connection(place, timeout=5.0))
                opened.append(connection)
                connection.sendall(beginning)
        yield opened


def trickled(place: Place, data: bytes, lasts_s: float, pieces: int = 20) -> bytes:
    """Send bytes little by little over so long; what came back, empty where the server hung up."""
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=lasts_s + 30.0) as connection:
        step = max(1, -(-len(data) // pieces))
        for start in range(0, len(data), step):
            connection.sendall(data[start : start + step])
            time.sleep(lasts_s / pieces)
        return connection.recv(65_536)
    return b""


# What a process holds -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Census:
    """What a process holds: threads, open files and sockets, children that run, resident memory."""

    threads: int
    files: int
    children: int
    resident_bytes: int


def census(pid: int) -> Census:
    """What a process holds now."""
    status = _status(pid)
    return Census(
        threads=int(status["Threads"]),
        files=len(os.listdir(f"/proc/{pid}/fd")),
        children=sum(map(alive, _children(pid))),
        resident_bytes=1024 * int(status["VmRSS"].split()[0]),
    )


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += map(int, (task / "children").read_text().split())
    return found
