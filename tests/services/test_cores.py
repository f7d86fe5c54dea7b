"""How many cores a server divides between its models."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.cores import own_cores
from services.inference.settings import InferenceSettings
from services.serve import ThisMachine
from tests.engine.cores import Cores, grant


@pytest.mark.parametrize(("quota", "count"), [(None, 8), (2, 2), (0.1, 1)])
def test_only_the_cores_that_it_may_use_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: float | None, count: int
) -> None:
    """In a container with two of 64 cores, each model had 64 threads and answered 64 requests at a time."""
    Cores.instead(8, monkeypatch)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    if quota is not None:
        grant(quota, tmp_path, monkeypatch)
    assert InferenceSettings(name="m", model="x:y").thread_count == count
    assert ThisMachine().threads(1) == count and ThisMachine().threads(3) == max(1, count // 3)


def test_replicas_on_one_machine_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups of all replicas were pinned to the same last cores, and their networks to the same others."""
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("needs Linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3, 5, 7, 8, 9})
    parts = [own_cores(replica, 3) for replica in range(3)]
    assert parts == [(1, 2), (3, 5), (7, 8, 9)]
    assert own_cores(0, 1) == (1, 2, 3, 5, 7, 8, 9)
    assert own_cores(0, 4) is None, "on one core, nothing runs next to anything"
    settings = [InferenceSettings(name="m", model="x:y", replica=replica, replicas=3) for replica in (0, 2)]
    given = [vars(ThisMachine().host(each))["_settings"].cores for each in settings]
    assert given == [(1, 2), (7, 8, 9)]
    assert vars(ThisMachine().host(InferenceSettings(name="m", model="x:y")))["_settings"].cores is None


@pytest.mark.parametrize(
    ("placement", "threads", "pinned"),
    [("overlapped", 2, [{4, 5}]), ("overlapped", 3, []), ("inline", 2, [])],
)
def test_engines_that_reserve_cores_for_lookups_keep_to_those_of_their_replica(
    monkeypatch: pytest.MonkeyPatch, placement: str, threads: int, pinned: list[set[int]]
) -> None:
    from services.inference import opening  # slow: brings in torch

    found: list[set[int]] = []
    monkeypatch.setattr(opening, "pin", found.append)
    settings = InferenceSettings(name="m", model="x:y", threads=threads, cores=(4, 5))
    chosen: Any = SimpleNamespace(placement=placement)
    opening.Opener(settings)._use_own_cores(chosen)
    assert found == pinned
