"""How many cores a server divides between its models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services import cores
from services.inference.settings import InferenceSettings
from services.serve import ThisMachine


@pytest.mark.parametrize(
    ("quota", "count"),
    [(None, 8), ("max 100000", 8), ("150000 100000", 2), ("1000 100000", 1), ("6400000 100000", 8)],
)
def test_only_the_cores_that_it_may_use_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, count: int
) -> None:
    """In a container with two of 64 cores, each model had 64 threads and answered 64 requests at a time."""
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("needs Linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(40, 48)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n", encoding="ascii")
    assert InferenceSettings(name="m", model="x:y").thread_count == count
    assert ThisMachine().threads(1) == count and ThisMachine().threads(3) == max(1, count // 3)
