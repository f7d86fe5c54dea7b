"""Exploring on a real Ray cluster: a node that drives, one with a core, and then another one."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gati.exploration import candidates, distributed, stages
from gati.exploration.explore import explore
from gati.exploration.further import explore_more
from gati.exploration.library import Library
from gati.exploration.progress import SilentProgress
from tests.exploration.networks import trained_state, write_digits
from tests.services.clusters import NOTICING

# importing it takes seconds, and only one of the tests' processes needs it
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs gati[ray]")]

NET = f"{Path(__file__).parent / 'networks.py'}:Net"
_SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False, "include_log_monitor": False}
VARIANTS = ("student(8)", "student(12)", "pyramid(32)")


class _Cluster:
    """Nodes of one core each, and a head without any; little memory, no process that only shows or scales."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "no_monitor": True, "_system_config": NOTICING, **_SMALL}
        self.ray = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []

    def add(self) -> None:
        """Start another node with a core."""
        self.nodes.append(self.ray.add_node(num_cpus=1, **_SMALL))

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
        patch.setenv("RAY_worker_niceness", "0")  # as urgent as the test: on a busy machine 15 is never
        patch.setattr(candidates, "too_slow", lambda *_: "")  # noise would choose on so small a network
        patch.setattr(stages, "LEAST_EXIT_STEPS", 60)
        patch.setattr(stages, "LEAST_STUDENT_STEPS", 40)
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
    held, more = write_digits(folder, 300)
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

    def note(self, text: str) -> None:
        self.notes.append(text)


class _KillsHalfWay(_Watched):
    """Kills one of two nodes, while each has a worker, nearly half-way through the exits or later."""

    def __init__(self, cluster: _Cluster) -> None:
        super().__init__()
        self.cluster, self.name, self.done, self.total = cluster, "", 0, 0

    def stage(self, name: str, total: int | None, done: int = 0, most_s: float | None = None) -> None:
        self.name, self.total, self.done = name, total or 0, done

    def advance(self, steps: int, detail: str = "") -> None:
        import ray

        self.done += steps
        late = self.name == "exits" and 2.5 * self.done > self.total
        if late and len(self.cluster.nodes) == 2 and not ray.available_resources().get("CPU"):
            self.cluster.kill(self.cluster.nodes[0].node_id)


def _assert_same(first: Library, second: Library) -> None:
    """Every file alike to the bit, but for the latencies, which are measured anew."""
    for folder in ("caches", "training"):
        names = sorted(path.name for path in (first.directory / folder).iterdir())
        assert names == sorted(path.name for path in (second.directory / folder).iterdir()) and names
        for name in (each for each in names if each.endswith(".safetensors")):
            one, two = (load_file(each.directory / folder / name) for each in (first, second))
            assert all(torch.equal(one[key], two[key]) for key in one), name
    for path in (first.directory / "outcomes").iterdir():
        assert filecmp.cmp(path, second.directory / "outcomes" / path.name, shallow=False), path.name
    assert first.operating_points == second.operating_points
    costs = {"lookup_ms": None, "overlapped_lookup_ms": None, "overlapped_penalty_ms": None}
    one, two = ([replace(trial, **costs) for trial in each.trials] for each in (first, second))
    assert one == two


def test_one_worker_and_two_of_which_one_dies_make_the_same_library(
    cluster: _Cluster, given: dict[str, Any], tmp_path: Path
) -> None:
    cluster.add()
    alone = _Watched()
    first = explore(**given, out=tmp_path / "one", progress=alone)
    assert not [note for note in alone.notes if note.startswith("lost")]
    assert {trial.status for trial in first.trials} == {"trained"} and len(first.trials) == 4

    cluster.add()
    killing = _KillsHalfWay(cluster)
    second = explore(**given, out=tmp_path / "two", progress=killing)
    assert len(cluster.nodes) == 1
    _assert_same(first, second)
    assert second.manifest.settings["workers"] == "1 cores"
    assert not (tmp_path / "two" / ".state").exists()

    explore_more(second.directory, epochs=0.1, ray=cluster.ray.address)
    rounds = json.loads((second.directory / "training" / "rounds.json").read_text(encoding="utf-8"))["rounds"]
    (only,) = rounds
    trained = only["better"] + only["no_better"]
    assert trained and len(trained) + len(only["left_out"]) == 4
