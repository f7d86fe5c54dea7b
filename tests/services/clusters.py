"""Servers of a model with two replicas and one spare: local processes, or actors on two Ray nodes."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.services.running import Serving
from tests.waiting import until

__all__ = ["MODEL", "NOTICING", "SLEEPY", "Replicated", "configure", "on_ray", "on_this_machine"]

MODEL, SLEEPY = "library", "sleepy"
_CONFIGURATION = f"""
[models.{MODEL}]
library = "library"
replicas = 2
[models.{SLEEPY}]
library = "library"
threads = 1
replicas_min = 0
replicas_max = 2
replicas_delay_ms = 1e-6
replicas_idle_s = 1.0
"""
# A lost node is noticed in seconds, not in half a minute. One that is only slow has 10 s for each answer.
NOTICING = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 5,
}
_STORE_BYTES = 80 * 2**20  # of /dev/shm, for each node; nothing is put there


@dataclass
class Replicated:
    """A server, and where its replicas run."""

    serving: Serving
    mark: str  # in the environment of its processes
    nodes: list[Any] = field(default_factory=list)  # that may be lost
    cluster: Any = None

    def replicas(self) -> list[dict[str, Any]]:
        """As the server tells of them."""
        found = self.serving.client.get(f"/v1/models/{MODEL}/replicas").json()["replicas"]
        assert isinstance(found, list)
        return found

    def sleepy(self) -> dict[str, Any]:
        """What the server says of the model that sleeps while nobody asks it."""
        found: dict[str, Any] = self.serving.client.get(f"/v2/models/{SLEEPY}/ready").json()
        return found

    def counted(self, metric: str, model: str) -> float | None:
        """The value of a metric of a model, None if there is none."""
        page = self.serving.client.get("/metrics").text
        found = re.search(rf'^{metric}{{model="{model}"}} (\S+)$', page, re.MULTILINE)
        return None if found is None else float(found[1])

    def wait_for_all(self) -> None:
        """Until both answer."""
        until(lambda: [each["state"] for each in self.replicas()] == ["ready"] * 2, every_s=0.05)

    def processes(self) -> dict[str, int]:
        """Process ids of the replicas, on whatever node."""
        return _processes(self.mark)

    def lose_a_node(self) -> None:
        """End a node without a word."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)


def configure(folder: Path) -> Path:
    """A configuration beside the library of `make_folder`: a model with two replicas, and one that sleeps."""
    file = folder / "replicated.toml"
    file.write_text(_CONFIGURATION, encoding="utf-8")
    return file


@contextmanager
def on_this_machine(configuration: Path) -> Iterator[Replicated]:
    """Replicas that the server supervises itself."""
    mark = uuid.uuid4().hex
    with Serving(configuration, environment={"MARK": mark}) as serving:
        yield Replicated(serving, mark)
    assert not _processes(mark)


@contextmanager
def on_ray(configuration: Path) -> Iterator[Replicated]:
    """Replicas on a head with room for two, and a node with room for one, which may be lost."""
    mark = uuid.uuid4().hex
    environment = {
        "MARK": mark,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else every other program goes before what a replica computes
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # nodes are on the loopback interface only
        "RAY_TMPDIR": tempfile.mkdtemp(prefix="gati-ray-", dir="/tmp"),  # sockets have short names
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    from ray.cluster_utils import Cluster  # reads the environment

    cluster = Cluster()
    try:
        shown = {"include_dashboard": False, "include_log_monitor": False}  # processes that take seconds
        settings = {**shown, "object_store_memory": _STORE_BYTES}
        cluster.add_node(num_cpus=2, no_monitor=True, _system_config=NOTICING, **settings)
        node = cluster.add_node(num_cpus=1, **settings)
        with Serving(configuration, "--ray", cluster.address, environment=environment) as serving:
            yield Replicated(serving, mark, [node], cluster)
        until(lambda: not _processes(mark))
    finally:
        cluster.shutdown()
        shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _processes(mark: str) -> dict[str, int]:
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit() or mark.encode() not in (folder / "environ").read_bytes():
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended, or is another user's
            continue
        if name := re.search(r"services\.inference - (\S+)", command):
            found[name[1]] = int(folder.name)
    return found
