"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.running import Serving, make_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache library, a pipeline and a configuration."""
    return make_folder(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def serving(folder: Path) -> Iterator[Serving]:
    """A server that tests may ask, but not harm."""
    with Serving(folder / "serve.toml") as running:
        yield running
