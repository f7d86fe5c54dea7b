"""Notebooks are kept without outputs, and run from top to bottom."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nbformat
import pytest

from tests.conftest import REPOSITORY, Demo
from tests.waiting import LONG_S

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


# What each says at the end of its story, in one of its outputs.
SAID = {
    "01_explore_and_compose": ("gain", "agreement"),
    "02_serve_and_plan": ("promise: at least 97 %", "status 429"),
    "03_learn_from_video": ("from memory", "agreement"),
}


# The same story with less of it, as each request takes time.
SHORTER = {"SIDE, FPS, SECONDS = 64, 10, 90": "SIDE, FPS, SECONDS = 64, 10, 45"}


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(SAID)
    written = "".join(path.read_text(encoding="utf-8") for path in NOTEBOOKS)
    assert all(long in written for long in SHORTER)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    kept = [cell.source for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    assert not kept, "run nbstripout on it"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    path: Path, measured_demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbclient import NotebookClient

    shutil.copytree(measured_demo.folder, tmp_path / "demo")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("PYTHONPATH", os.fspath(REPOSITORY))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for long, short in SHORTER.items():
            cell.source = cell.source.replace(long, short)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=int(LONG_S), kernel_name="python3", resources=where).execute()
    printed = [
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    ]
    assert any(all(words in text for words in SAID[path.stem]) for text in printed)
