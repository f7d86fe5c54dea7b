"""The injected faults work as described, checked on a process that reports what it observes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services import faults
from tests.waiting import LONG_S, until

PROBE = """
import errno, os, sys, time
for line in sys.stdin:
    word, _, path = line.strip().partition(" ")
    try:
        if word == "write":
            with open(path, "ab", 0) as file:
                file.write(b"x" * 100)
        elif word == "open":
            kept = [os.open(path, os.O_RDONLY) for _ in range(50)]
        print(time.time() if word == "time" else "done", flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"""


class Probe:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process

    def ask(self, word: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@contextmanager
def probe(pythonpath: str = "") -> Iterator[Probe]:
    command = [sys.executable, "-c", PROBE]
    environment = {**os.environ, "PYTHONPATH": pythonpath}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield Probe(process)
        finally:
            process.kill()


def test_a_stopped_process_goes_on_and_a_killed_one_does_not() -> None:
    with probe() as tested:
        assert tested.ask("hello") == "done"
        with faults.stopped(tested.pid):
            until(lambda: Path(f"/proc/{tested.pid}/stat").read_text().split()[2] == "T")
            assert faults.alive(tested.pid)
        assert tested.ask("hello") == "done"
        faults.killed(tested.pid)
        until(lambda: not faults.alive(tested.pid))
        faults.killed(2**22 - 1)  # nobody


def test_a_full_disk_is_full_for_one_process_and_for_a_while(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with probe() as tested:
        with faults.disk_full(tested.pid):
            assert tested.ask(f"write {file}") == "EFBIG"
        assert tested.ask(f"write {file}") == "done" and file.stat().st_size == 100


def test_files_run_out_and_come_back(tmp_path: Path) -> None:
    with probe() as tested:
        assert tested.ask("hello") == "done"
        with faults.no_files_left(tested.pid, more=3):
            assert tested.ask(f"open {tmp_path}") == "EMFILE"
        assert tested.ask(f"open {tmp_path}") == "done"
        assert faults.census(tested.pid).files >= 50


def test_the_clock_jumps_for_others_only(tmp_path: Path) -> None:
    clock = faults.JumpingClock(tmp_path / "clock")
    with probe(str(clock.folder)) as tested:
        assert abs(float(tested.ask("time")) - time.time()) < LONG_S
        clock.jump(-1e6)
        assert abs(float(tested.ask("time")) + 1e6 - time.time()) < LONG_S
        clock.jump(3e6)
        assert abs(float(tested.ask("time")) - 2e6 - time.time()) < LONG_S
    clock.close()


def test_what_is_gone_comes_back_as_it_was(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "kept").write_text("kept")
    file.write_text("kept")
    with faults.gone(folder), faults.gone(file):
        assert not folder.exists() and not file.exists()
        file.write_text("another")
        (folder / "other").mkdir(parents=True)
    assert [path.name for path in folder.rglob("*")] == ["sub", "kept"] and file.read_text() == "kept"
    assert len(list(tmp_path.iterdir())) == 2


def test_connections_are_cut_half_sent_and_slow() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()[:2]
        faults.cut(place, b"abc")
        connection, _ = server.accept()
        with connection:
            try:
                while connection.recv(10):
                    continue
                raise AssertionError("it said farewell")
            except ConnectionResetError:
                pass
        with faults.half_sent(place, [b"one", b"two"]) as opened:
            assert len(opened) == 2
            for expected in (b"one", b"two"):
                with server.accept()[0] as connection:
                    assert connection.recv(10) == expected
    assert faults.trickled(place, b"anything", 0.01) == b""


def test_the_census_counts_threads_files_children_and_memory() -> None:
    before = faults.census(os.getpid())
    with probe() as tested, open(os.devnull) as _:
        assert tested.ask("hello") == "done"  # it has begun
        now = faults.census(os.getpid())
        assert now.children == before.children + 1
        assert now.files >= before.files + 3  # the file, and two pipes
        other = faults.census(tested.pid)
        assert other.threads == 1 and other.children == 0 and other.resident_bytes > 2**20
