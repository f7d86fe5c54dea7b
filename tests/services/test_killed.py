"""Killed at every stage of a version's life: nothing is lost, no half version serves, no proof is forgotten.

What adapts, the guard and memory are killed at each of their changes of files, one after the other, by forked
processes (`tests.services.dying`). The repository itself: `tests/versions/test_repository.py`; the record
store: `tests/samples/test_store.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow


def killed(module: str, *arguments: str) -> Any:
    """Run a module of these tests in a process that has no other thread yet, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.services.{module}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_adaptation_killed_at_every_change_publishes_whole_versions_and_loses_none(tmp_path: Path) -> None:
    """Between weights and manifest, between publishing and activating: the one before serves, or the new one.

    The process after it activates what was published, and publishes the next version.
    """
    found = killed("killed_adaptation", str(tmp_path))
    changes = [change.split("/")[0].split(" ")[0] for change, _ in found]
    assert len(found) >= 32 and {"open", "os.fsync", "os.rename", ""} <= set(changes)
    assert [versions for _, versions in found if versions == [1]], "it was never killed before publishing"
    late = [change for change, versions in found if versions == [1, 2] and change]
    assert any("activations" in change for change in late), "nor between publishing and activating"


def test_what_was_told_before_a_kill_is_known_after_it(tmp_path: Path) -> None:
    """A proof goes on with the audits that were written, each counted once; what was stopped stays so."""
    found = killed("killed_state", str(tmp_path))
    stages = {
        "proofs": {"made 16", "made 32", "took over", "stopped"},
        "memory": {"proven", "saved", "stopped"},
    }
    for what, deaths in found.items():
        assert len(deaths) >= 40
        told = {last.split(",")[0] for _, last in deaths}
        assert stages[what] <= told, f"{what}: it was not killed at every stage"
