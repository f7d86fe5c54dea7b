"""Models of two replicas in real processes, one of which dies, or gets another version, under load."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.services.running import Serving, make_folder
from tests.services.test_lifecycle import Load
from tests.waiting import until

pytestmark = pytest.mark.slow

INFER = "/v2/models/small/infer"


def test_a_killed_replica_is_not_noticed_and_comes_back(folder: Path) -> None:
    with Serving(folder / "library", "--replicas", "2") as running:
        infer = "/v2/models/library/infer"
        states = "/v1/models/library/replicas"

        def ready() -> int:
            found = running.client.get(states).json()["replicas"]
            return sum(each["state"] == "ready" for each in found)

        until(lambda: ready() == 2)
        with Load(running.url, infer, 4) as load:
            until(lambda: load.statuses[200] > 40)
            first = running.processes()
            assert set(first) == {"library", "library@1"}
            os.kill(first["library@1"], signal.SIGKILL)
            before = load.statuses[200]
            until(lambda: load.statuses[200] > before + 40)
            until(lambda: ready() == 2)
            before = load.statuses[200]
            until(lambda: load.statuses[200] > before + 40)
        assert set(load.statuses) == {200} and not load.errors
        assert running.processes()["library@1"] != first["library@1"]
        page = running.client.get("/metrics").text
        assert 'gati_restarts_total{model="library",replica="1"} 1.0' in page
        assert 'gati_replicas_ready{model="library"} 2.0' in page
        answered = [
            line
            for line in page.splitlines()
            if line.startswith("gati_service_seconds_count") and not line.endswith(" 0.0")
        ]
        assert len(answered) == 2, "both answer"


def test_versions_are_swapped_on_both_and_no_request_is_lost(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with Serving(folder / "library", "--replicas", "2") as running:
        load_url = "/v2/repository/models/library/load"
        with Load(running.url, "/v2/models/library/infer", 2, pause_s=0.005) as load:
            for number in range(6):
                name = ("other", "default")[number % 2]
                reply = running.client.post(load_url, json={"parameters": {"composition": name}})
                assert reply.status_code == 200 and reply.json()["version"] == name, reply.text
                answers = {running.infer("library").json()["model_version"] for _ in range(8)}
                assert answers == {name}
                before = load.statuses[200]
                until(lambda before=before: load.statuses[200] > before)  # type: ignore[misc]
        assert set(load.statuses) == {200} and not load.errors
        found = running.client.get("/v1/models/library/replicas").json()["replicas"]
        assert [each["version"] for each in found] == ["default", "default"]
    assert {path.name for path in (folder / "library" / "standing").glob("*.json")} == {
        "library.json",
        "library@1.json",
        "library.versions.json",
    }
