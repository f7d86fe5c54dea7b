"""Fixtures that several rooms share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

# Before torch is imported anywhere, and for the processes that tests start: networks as small as those of
# tests are many times faster on one core when another program keeps the other one busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_DATA = REPOSITORY.parent / "shared" / "data"


class Demo(NamedTuple):
    """What a short demo left behind: its folder, what it said, and what it measured."""

    folder: Path
    said: str
    agreement: float

    @property
    def library(self) -> Path:
        return self.folder / "library"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with CIFAR-10 and public checkpoints, for tests on real files."""
    if not (SHARED_DATA / "cifar10" / "cifar10_val.npz").is_file():
        pytest.skip("needs CIFAR-10 and checkpoints in ../shared/data, which is not part of the repository")
    return SHARED_DATA


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """A demo run once a session, with less training than the real one. Slow; tests must not change it."""
    import gati

    folder = tmp_path_factory.mktemp("digits") / "demo"
    said: list[str] = []
    evaluation = gati.demo(folder, epochs=20, explore_budget_s=45.0, say=said.append)
    return Demo(folder, "\n".join(said), evaluation.agreement)


@pytest.fixture(scope="session")
def measured_demo(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The demo, its network measured on every engine installed here; that takes minutes the first time."""
    import gati

    folder = tmp_path_factory.mktemp("measured") / "demo"
    shutil.copytree(demo.folder, folder)
    gati.compose(folder / "library", accuracy=0.97, name="measured")
    return demo._replace(folder=folder)
