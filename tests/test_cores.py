"""The cores that a process may use, and the quotas of containers and units."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gati import cores
from gati.cores import core_count, within_quota


@pytest.fixture(autouse=True)
def eight_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(40, 48)), raising=False)
    monkeypatch.setattr(cores, "_GROUPS", tmp_path)
    monkeypatch.setattr(cores, "_OWN_GROUPS", tmp_path / "cgroup")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")


def test_without_control_groups_the_cores_count() -> None:
    assert core_count() == 8 and within_quota(3) == 3


@pytest.mark.parametrize(
    ("quota", "count"),
    [
        pytest.param("max 100000", 8, id="none"),
        pytest.param("200000 100000", 2, id="whole"),
        pytest.param("50000 25000", 2, id="another period"),
        pytest.param("110000 100000", 1, id="a little more: two threads would stop half of the time"),
        pytest.param("150000 100000", 2, id="half"),
        pytest.param("1000 100000", 1, id="hardly any"),
        pytest.param("6400000 100000", 8, id="more than there are"),
        pytest.param("", 8, id="empty"),
        pytest.param("x y", 8, id="damaged"),
        pytest.param("100000 0", 8, id="no period"),
    ],
)
def test_a_quota_counts_as_the_nearest_number_of_cores(quota: str, count: int, tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", quota)
    write(tmp_path / "cgroup", "0::/")
    assert core_count() == count
    assert within_quota(1) == 1


@pytest.mark.parametrize(
    ("own", "count"),
    [
        ("1:cpuset:/elsewhere\n0::/system.slice/gati.service", 2),
        ("0::/system.slice/other.service", 4),  # that of the slice
        ("0::/", 8),
        ("0::/../neighbour", 8),
        ("nonsense", 8),
    ],
)
def test_quotas_of_the_groups_around_count(own: str, count: int, tmp_path: Path) -> None:
    write(tmp_path / "system.slice" / "gati.service" / "cpu.max", "200000 100000")
    write(tmp_path / "system.slice" / "cpu.max", "400000 100000")
    write(tmp_path / "cgroup", own)
    assert core_count() == count


@pytest.mark.parametrize(
    ("own", "group", "count"),
    [
        pytest.param("4:cpu,cpuacct:/docker/1a2b", "cpu,cpuacct", 3, id="a container, which shows the root"),
        pytest.param("4:cpu,cpuacct:/docker/1a2b", "cpuset/docker/1a2b", 8, id="another hierarchy"),
        pytest.param("4:cpuacct,cpu:/a/b\n0::/", "cpuacct,cpu/a", 3, id="the group around, next to v2"),
        pytest.param("4:cpuacct,cpu:/a/b", "cpu/a", 3, id="mounted under another name"),
        pytest.param("4:cpu:/a\n3:cpuset:/b", "cpu/a", 3, id="cpu alone"),
        pytest.param("4:cpuset:/a", "cpuset/a", 8, id="not of time"),
        pytest.param(None, "cpu", 3, id="the own group is not known"),
        pytest.param("0::/a", "cpu", 8, id="a group of v2 that has the name of a controller"),
    ],
)
def test_quotas_of_control_groups_v1_count(own: str | None, group: str, count: int, tmp_path: Path) -> None:
    write(tmp_path / group / "cpu.cfs_quota_us", "300000")
    write(tmp_path / group / "cpu.cfs_period_us", "100000")
    if own is not None:
        write(tmp_path / "cgroup", own)
    assert core_count() == count
    write(tmp_path / group / "cpu.cfs_quota_us", "-1")
    assert core_count() == 8, "there is no quota"
