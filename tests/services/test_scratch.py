"""Temporary folders disappear with their process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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
        other.send_signal(signal.SIGKILL)
    young = tmp_path / "gati-test-young"
    young.mkdir()
    Scratch("elsewhere").close()
    assert folder.exists(), "of another kind"
    Scratch("test").close()
    assert not folder.exists() and mine.path.is_dir() and another.path.is_dir() and young.is_dir()
    for each in (mine, another):
        each.close()
        assert not each.path.exists()
