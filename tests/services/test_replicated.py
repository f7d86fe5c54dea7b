"""Two replicas in real processes, local and on Ray, that die and swap versions under load."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.services.clusters import MODEL, SLEEPY, Replicated, configure, on_ray, on_this_machine
from tests.services.running import make_folder, request
from tests.services.test_lifecycle import Load
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.slow

INFER = f"/v2/models/{MODEL}/infer"
PAUSE_S = 0.05  # of each client between its requests: what starts meanwhile needs the machine
PLACES = {"processes": on_this_machine, "ray": on_ray}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("replicated")) / "library"


@pytest.fixture(scope="module", params=PLACES)
def replicated(request: pytest.FixtureRequest, library: Path) -> Iterator[Replicated]:
    if request.param == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with PLACES[request.param](configure(library.parent)) as running:
        running.wait_for_all()
        yield running


def test_a_model_grows_with_its_load_sleeps_when_nobody_asks_and_wakes_as_it_was(
    replicated: Replicated, library: Path
) -> None:
    client = replicated.serving.client
    reply = client.post(
        f"/v2/repository/models/{SLEEPY}/load", json={"parameters": {"composition": "other"}}
    )  # which wakes it, should it sleep already
    assert reply.status_code == 200, reply.text
    path = f"/v2/models/{SLEEPY}/infer"
    if not replicated.nodes:  # there, no core is left for another one
        patient = request(timeout_ms=1e3 * LONG_S)  # it may sleep by now, and a start takes seconds
        with Load(replicated.serving.url, path, 2, body=patient, pause_s=PAUSE_S) as load:
            until(lambda: replicated.counted("gati_replicas_ready", SLEEPY) == 2)
        assert set(load.statuses) == {200} and not load.errors
    said = replicated.serving.infer(SLEEPY, timeout_ms=1e3 * LONG_S).json()
    until(lambda: replicated.sleepy()["state"] == "asleep", every_s=0.05)
    assert replicated.sleepy()["ready"]
    document = {"ready": True, "waiting_for": {}, "asleep": [SLEEPY]}
    assert client.get("/v2/health/ready").json() == document
    until(lambda: not any(name.startswith(SLEEPY) for name in replicated.processes()))
    assert replicated.counted("gati_replicas", SLEEPY) == 0
    waited = replicated.serving.infer(SLEEPY, timeout_ms=1e3 * LONG_S)
    assert waited.status_code == 200, waited.text
    for field in ("model_version", "outputs"):
        assert waited.json()[field] == said[field]
    assert said["model_version"] == "other"
    assert waited.json()["parameters"]["promise"] == said["parameters"]["promise"]
    if replicated.nodes:  # there, it leaves its core to others
        until(lambda: replicated.sleepy()["state"] == "asleep", every_s=0.05)


def test_requests_are_answered_by_both(replicated: Replicated) -> None:
    def both() -> bool:
        """Whether the page tells of answers of each; one that is late is left out for a while."""
        page = replicated.serving.client.get("/metrics").text
        of_model = f'gati_service_seconds_count{{model="{MODEL}"'
        counts = [line for line in page.splitlines() if line.startswith(of_model)]
        answered = len(counts) == 2 and not any(line.endswith(" 0.0") for line in counts)
        return answered and f'gati_replicas_ready{{model="{MODEL}"}} 2.0' in page

    with Load(replicated.serving.url, INFER, 2, pause_s=PAUSE_S) as load:
        until(lambda: load.statuses[200] > 40 and both())
    assert set(load.statuses) == {200} and not load.errors
    assert {MODEL, f"{MODEL}@1"} <= set(replicated.processes())


def test_versions_are_swapped_on_both_and_no_request_is_lost(replicated: Replicated, library: Path) -> None:
    client = replicated.serving.client
    with Load(replicated.serving.url, INFER, 2, pause_s=PAUSE_S) as load:
        for name in ("other", "default") * 2:
            reply = client.post(
                f"/v2/repository/models/{MODEL}/load", json={"parameters": {"composition": name}}
            )
            assert reply.status_code == 200 and reply.json()["version"] == name, reply.text
            answers = {replicated.serving.infer(MODEL).json()["model_version"] for _ in range(8)}
            assert answers == {name}
            before = load.statuses[200]
            until(lambda before=before: load.statuses[200] > before)  # type: ignore[misc]
    assert set(load.statuses) == {200} and not load.errors
    assert [each["version"] for each in replicated.replicas()] == ["default"] * 2
    standing = {path.name for path in (library / "standing").glob("*.json")}
    assert {f"{MODEL}.json", f"{MODEL}@1.json"} <= standing


def test_a_killed_replica_is_not_noticed_and_comes_back(replicated: Replicated) -> None:
    victim = replicated.processes()[f"{MODEL}@1"]
    with Load(replicated.serving.url, INFER, 2, pause_s=PAUSE_S) as load:
        until(lambda: load.statuses[200] > 40)
        os.kill(victim, signal.SIGKILL)
        until(lambda: replicated.replicas()[1]["restarts"] == 1)
        replicated.wait_for_all()
        before = load.statuses[200]
        until(lambda: load.statuses[200] > before + 40)
    assert set(load.statuses) == {200} and not load.errors
    assert replicated.processes()[f"{MODEL}@1"] != victim


def test_a_lost_node_is_not_noticed_and_its_replica_comes_back_on_another(replicated: Replicated) -> None:
    if not replicated.nodes:
        pytest.skip("there is only this machine")
    before = replicated.processes()
    with Load(replicated.serving.url, INFER, 2, pause_s=PAUSE_S) as load:
        until(lambda: load.statuses[200] > 40)
        replicated.lose_a_node()
        until(lambda: any(each["state"] != "ready" for each in replicated.replicas()))
        replicated.wait_for_all()
    assert set(load.statuses) == {200} and not load.errors
    after = replicated.processes()
    assert set(after) == set(before) and len(set(after.items()) - set(before.items())) == 1
