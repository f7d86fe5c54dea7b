"""What several tests of compositions do without."""

from __future__ import annotations

import pytest


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far a choice may be from the best one is not computed: it takes long, and decides nothing."""
    monkeypatch.setattr("gati.composition.exact.priced_bound_ms", lambda *_: 0.0)
