"""Exploring on a real Ray cluster of three nodes: one that drives, and two with a core each."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gati.exploration import candidates, distributed, stages
from gati.exploration.explore import explore
from gati.exploration.library import Library
from gati.exploration.progress import SilentProgress
from tests.exploration.networks import trained_state, write_digits

pytest.importorskip("ray", reason="needs gati[ray]")
pytestmark = pytest.mark.slow

NET = f"{Path(__file__).parent / 'networks.py'}:Net"
VARIANTS = ("student(8)", "student(12)", "pyramid(32)")


class _Cluster:
    """Two nodes of one core beside a head without any; nothing but loopback, no dashboard."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.small = {"object_store_memory": 80 << 20, "include_dashboard": False}
        self.ray = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **self.small})
        self.nodes = [self.ray.add_node(num_cpus=1, **self.small) for _ in range(2)]

    def kill(self, node_id: str) -> None:
        """End a node and all its workers at once."""
        node = next(each for each in self.nodes if each.node_id == node_id)
        self.nodes.remove(node)
        self.ray.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[_Cluster]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_OVERRIDE_NODE_IP_ADDRESS", "127.0.0.1")
        patch.setattr(candidates, "too_slow", lambda *_: "")  # noise would choose on so small a network
        patch.setattr(stages, "LEAST_EXIT_STEPS", 150)
        patch.setattr(stages, "LEAST_STUDENT_STEPS", 150)
        patch.setattr(stages, "_SAVE_EVERY_S", 0.2)
        patch.setattr(distributed, "_SLICE_S", 0.1)
        made = _Cluster()
        try:
            yield made
        finally:
            ray.shutdown()
            made.ray.shutdown()


@pytest.fixture(scope="module")
def given(cluster: _Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("digits")
    held, more = write_digits(folder)
    save_file(trained_state(), folder / "net.safetensors")
    return {
        "model": NET,
        "checkpoint": folder / "net.safetensors",
        "data": str(held),
        "train_data": str(more),
        "variants": VARIANTS,
        "blocks": "blocks.[12]",
        "epochs": 0.1,
        "ray": cluster.ray.address,
    }


class _Watched(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.done, self.total = 0, 0

    def stage(self, name: str, total: int, done: int = 0) -> None:
        self.done, self.total = done, total

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, steps: int, detail: str = "") -> None:
        self.done += steps


class _KillsHalfWay(_Watched):
    """Kills a node on which a worker trains, half-way through the students."""

    def __init__(self, cluster: _Cluster) -> None:
        super().__init__()
        self.cluster, self.killed = cluster, ""

    def advance(self, steps: int, detail: str = "") -> None:
        super().advance(steps, detail)
        if not self.killed and 2 * self.done > self.total:
            from ray.util.state import list_actors

            living = [actor.node_id for actor in list_actors() if actor.state == "ALIVE"]
            self.killed = living[0]
            self.cluster.kill(self.killed)


def _assert_same(first: Library, second: Library) -> None:
    """Every file alike to the bit, but for the latencies, which are measured anew."""
    for folder in ("caches", "training"):
        names = sorted(path.name for path in (first.directory / folder).iterdir())
        assert names == sorted(path.name for path in (second.directory / folder).iterdir()) and names
        for name in names:
            one, two = (load_file(each.directory / folder / name) for each in (first, second))
            assert all(torch.equal(one[key], two[key]) for key in one), name
    for path in (first.directory / "outcomes").iterdir():
        assert filecmp.cmp(path, second.directory / "outcomes" / path.name, shallow=False), path.name
    assert first.operating_points == second.operating_points
    costs = {"lookup_ms": None, "overlapped_lookup_ms": None, "overlapped_penalty_ms": None}
    one, two = ([replace(trial, **costs) for trial in each.trials] for each in (first, second))
    assert one == two


def test_two_workers_one_that_dies_and_one_alone_make_the_same_library(
    cluster: _Cluster, given: dict[str, Any], tmp_path: Path
) -> None:
    both, killing, alone = _Watched(), _KillsHalfWay(cluster), _Watched()
    first = explore(**given, out=tmp_path / "two", progress=both)
    assert not [note for note in both.notes if note.startswith("lost")]
    assert {trial.status for trial in first.trials} == {"trained"} and len(first.trials) == 4

    second = explore(**given, out=tmp_path / "killed", progress=killing)
    assert killing.killed and [note for note in killing.notes if note.startswith("lost the worker on")]
    _assert_same(first, second)

    assert len(cluster.nodes) == 1
    third = explore(**given, out=tmp_path / "one", progress=alone)
    assert not [note for note in alone.notes if note.startswith("lost")]
    _assert_same(first, third)
    assert third.manifest.settings["workers"] == "1 cores"
    assert not (tmp_path / "killed" / ".state").exists()
