"""Shapes in annotations hold: a process with the plugin calls every function that has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_shapes_are_those_of_the_annotations() -> None:
    pytest.importorskip("jaxtyping")
    pytest.importorskip("beartype")
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.checked_shapes", "--noconftest", "-o", "addopts="]
    command = [sys.executable, "-m", "pytest", *options, "tests/shapes_in_use.py"]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other plugins take seconds to import
    done = subprocess.run(command, cwd=REPOSITORY, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_nobody_needs_what_executes_them() -> None:
    code = (
        "import sys, gati.caches, gati.engine.engine, gati.evaluation.by_class; "
        "sys.exit(bool({'jaxtyping', 'beartype'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
