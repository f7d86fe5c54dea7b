"""Temporary folders disappear with their process, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gati.errors import StorageError
from services.scratch import Scratch
from tests.conftest import REPOSITORY

PROGRAM = """
import sys, time
from services.scratch import Scratch
scratch = Scratch("test")
(scratch.path / "large").write_bytes(b"x" * 1000)
print(scratch.path, flush=True)
time.sleep(3600)
"""


def is_locked(folder: Path) -> bool:
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def test_what_a_killed_process_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment
    ) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        mine, another = Scratch("test"), Scratch("elsewhere")
        assert (folder / "large").is_file(), "somebody holds it"
        assert mine.path.stat().st_mode & 0o777 == 0o700
        assert is_locked(mine.path), "or systemd-tmpfiles would remove what is in it after some days"
        other.send_signal(signal.SIGKILL)
    young = tmp_path / "gati-test-young"
    young.mkdir()
    Scratch("elsewhere").close()
    assert folder.exists(), "of another kind"
    Scratch("test").close()
    assert not folder.exists() and mine.path.is_dir() and another.path.is_dir() and young.is_dir()
    for each in (mine, another, mine):
        each.close()
        assert not each.path.exists()


def test_a_folder_that_another_process_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was gone once it was used: whoever swept had seen a lock that was still free."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    original, others = fcntl.flock, [True]

    def flock(file: Any, how: int) -> None:
        if others and how == fcntl.LOCK_EX:
            others.clear()
            Scratch("test").close()  # as another process may, right before this one has its lock
        original(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    mine = Scratch("test")
    assert not others and (mine.path / "lock").is_file()
    (mine.path / "used").write_text("yes", encoding="utf-8")
    Scratch("test").close()
    assert (mine.path / "used").is_file(), "it is locked by now"
    mine.close()
    assert not list(tmp_path.iterdir())


def test_where_no_folder_can_be_made_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the root file system was read-only, each start of a process was a traceback in the log."""

    def no_folder() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    with pytest.raises(StorageError, match=r"\(No usable .*\); set TMPDIR to a folder with free space"):
        Scratch("test")
