"""Shapes in annotations hold: a process with the plugin calls every function that has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_shapes_are_those_of_the_annotations() -> None:
    pytest.importorskip("jaxtyping")
    pytest.importorskip("beartype")
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.checked_shapes"]
    command = [sys.executable, "-m", "pytest", *options, "tests/shapes_in_use.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_nobody_needs_what_executes_them() -> None:
    code = (
        "import sys, gati.caches, gati.engine.engine, gati.evaluation.by_class; "
        "sys.exit(bool({'jaxtyping', 'beartype'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
