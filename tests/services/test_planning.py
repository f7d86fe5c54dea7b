"""Planning while serving, with real processes and sockets: early hits, and measurements of live traffic."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gati
from gati.composition.walk import certify as walk
from gati.pipelines.measurements import (
    BehaviourMeasurement,
    Measurements,
    OptionMeasurement,
    StageMeasurement,
    measurements_file,
)
from tests.engine.served import exit_at, images, make_served, rewrite
from tests.services.running import CLASSES, LITTLE, Serving, certify
from tests.waiting import LONG_S

pytestmark = pytest.mark.slow

HIT, MISS = 0, 1  # images that leave after the first block, and at the end
SURE = 0.37  # what tells their confidences apart

STAGES = """
class_names = ["north", "east", "south", "west"]
edges = [{ from = "first", to = "second" }]
[stages.first.options]
only = { library = "library" }
[stages.second.options]
small = { library = "library" }
large = { library = "library" }
"""
SERVE = """
[models.net]
library = "library"
threads = 1
workers = 1
[pipelines.followed]
file = "followed.toml"
[pipelines.mistaken]
file = "mistaken.toml"
explore_every = 4
[pipelines.offline]
file = "mistaken.toml"
live = false
"""


def option(accuracy: float, ms: float, *behaviours: BehaviourMeasurement) -> OptionMeasurement:
    return OptionMeasurement("library default", accuracy, (ms,), {}, "torch", (SURE,), behaviours)


def behaviour(after: str | None, level: int | None, accuracy: float, ms: float) -> BehaviourMeasurement:
    return BehaviourMeasurement(after, level, (0.5, 0.5), (accuracy, accuracy), ((ms,), (ms,)))


def measured(second: dict[str, OptionMeasurement]) -> Measurements:
    labels = dict.fromkeys(CLASSES, 0.25)
    first = {"only": option(0.9, 1.0, behaviour(None, None, 0.9, 1.0))}
    stages = {"first": StageMeasurement(100, labels, first), "second": StageMeasurement(100, labels, second)}
    return Measurements("p", "test", "0" * 64, "cpu", 1, "2026-01-01T00:00:00+00:00", stages)


def after_findings(sure: float, unsure: float, ms: float) -> OptionMeasurement:
    return option(
        (sure + unsure) / 2,
        ms,
        behaviour(None, None, (sure + unsure) / 2, ms),
        behaviour("only", 0, sure, ms),
        behaviour("only", 1, unsure, ms),
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A pipeline that was measured well, and one whose large network was measured on a far slower machine."""
    folder = tmp_path_factory.mktemp("planning")
    library = make_served(folder)
    rewrite(library, exits=(exit_at(0, 0.3),))
    certify(library, certificate=walk([(10, 200)], LITTLE, 0.05))
    _check_hits(library)
    files = {
        # after a sure answer both are right, after another one only the large network is
        "followed": {"small": after_findings(0.95, 0.4, 10.0), "large": after_findings(0.95, 0.9, 40.0)},
        "mistaken": {
            "small": option(0.6, 1.0),
            "large": option(0.9, 500_000.0),
        },
    }
    for name, second in files.items():
        (folder / f"{name}.toml").write_text(STAGES, encoding="utf-8")
        measured(second).save(measurements_file(folder / f"{name}.toml"))
    (folder / "serve.toml").write_text(SERVE, encoding="utf-8")
    with Serving(folder / "serve.toml") as serving:
        yield serving


def _check_hits(library: Path) -> None:
    """The two images leave where these tests say they do, with those confidences."""
    engine = gati.load(library)
    assert engine.preprocessing is not None
    hit, miss = (engine(engine.preprocessing(images(2)[[index]]))[0] for index in (HIT, MISS))
    assert (hit.exit, miss.exit) == ("blocks.0", "base")
    assert float(miss.probabilities.max()) < SURE < float(hit.probabilities.max())


def ask(running: Serving, pipeline: str, index: int) -> dict[str, Any]:
    data = images(2)[[index]]
    tensor = {"name": "input", "shape": list(data.shape), "datatype": "UINT8", "data": data.ravel().tolist()}
    body = {"inputs": [tensor], "parameters": {"latency_slo_ms": 60_000.0}}
    reply = running.client.post(f"/v1/pipelines/{pipeline}/query", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_an_early_hit_changes_the_option_of_the_stage_after_it(running: Serving) -> None:
    for index, hit, after in ((HIT, True, "small"), (MISS, False, "large"), (HIT, True, "small")):
        first, second = ask(running, "followed", index)["stages"]
        assert (first["option"], first["from_cache"], second["option"]) == ("only", hit, after)


def test_a_wrong_measurement_is_found_out(running: Serving) -> None:
    """Offline 500 s, in truth milliseconds: with an SLO of 60 s it is only chosen for what is seen live."""
    assert ask(running, "offline", HIT)["stages"][1]["option"] == "small"
    until_s = time.monotonic() + LONG_S
    in_a_row = 0  # hits alone: lookups that only miss would be given a rest
    while in_a_row < 3:  # more than exploring does: at most every fourth
        in_a_row = in_a_row + 1 if ask(running, "mistaken", HIT)["stages"][1]["option"] == "large" else 0
        assert time.monotonic() < until_s, shown(running, "mistaken")
    assert ask(running, "offline", HIT)["stages"][1]["option"] == "small"
    found = shown(running, "mistaken")
    assert found["replans"] >= 1
    for stage in found["stages"]:
        for each in stage["options"]:
            agreement = each["live"]["agreement"]
            assert agreement["promised"] == pytest.approx(LITTLE)  # what was certified, whatever is seen
            assert agreement["based_on"].startswith("the certificate")


def shown(running: Serving, name: str) -> dict[str, Any]:
    found: dict[str, Any] = running.client.get(f"/v1/pipelines/{name}").json()
    return found


def test_what_is_planned_with_is_shown(running: Serving) -> None:
    for index in (HIT, MISS) * 10:
        ask(running, "followed", index)
    found = shown(running, "followed")
    assert found["live"] is True
    first = found["stages"][0]["options"][0]["live"]
    assert first["requests"] >= 20 and 0.0 < first["prior_share"] < 1.0
    assert 0.3 < first["hit_rate"] < 0.7
    assert first["engine_ms"] > 0.0 and first["queue_ms"] >= 0.0 and first["way_ms"] > 0.0
    offline = shown(running, "offline")
    assert (offline["live"], offline["replans"]) == (False, 0)
    assert offline["stages"][0]["options"][0]["live"] is None
    page = running.client.get("/metrics").text
    for part in ("planned", "engine", "queue", "way"):
        where = f'option="only",part="{part}",pipeline="followed",stage="first"'
        assert f"gati_option_seconds{{{where}}}" in page
    assert 'gati_option_hit_rate{option="only",pipeline="followed",stage="first"}' in page
    figures = [line for line in page.splitlines() if line.startswith("gati_option")]
    assert figures and not any('pipeline="offline"' in line for line in figures)


def test_the_command_line_shows_it(running: Serving, repository: Path) -> None:
    ask(running, "followed", HIT)
    command = [sys.executable, "-m", "gati", "pipeline", "status"]
    said = {
        name: subprocess.run(
            [*command, name, "--url", running.url],
            capture_output=True,
            text=True,
            cwd=repository,
            check=False,
        )
        for name in ("followed", "offline", "none")
    }
    assert said["followed"].returncode == 0, said["followed"].stderr
    assert "first: north | east | south | west" in said["followed"].stdout
    assert "leave early" in said["followed"].stdout and "of the figures from" in said["followed"].stdout
    assert "offline figures only" in said["offline"].stdout and "requests" not in said["offline"].stdout
    assert said["none"].returncode == 2 and "no pipeline 'none'" in said["none"].stderr
