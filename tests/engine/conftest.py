"""What several tests of the engine start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.served import make_served


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A cache library with two untrained caches, as `explore` and `compose` leave it."""
    return make_served(tmp_path)
