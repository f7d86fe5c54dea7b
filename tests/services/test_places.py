"""Memory of places, resting lookups and settings of a version, in a real inference service."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gati.cli import app
from gati.composition.composition import Composition
from gati.exploration.library import Library
from gati.versions.lineage import Lineage
from gati.versions.repository import ModelRepository
from tests.services.running import certify, make_folder, request
from tests.services.test_following import (
    MODEL,
    RIGHT,
    TARGET,
    Server,
    answering,
    kill,
    metric,
    serve,
    serve_to_be_killed,
    weights,
)
from tests.waiting import until

NEVER = 2.0  # a threshold that no score reaches


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Path]:
    yield make_folder(tmp_path)


def without_hits(folder: Path) -> None:
    """Certified caches that never answer: what answers early is memory."""
    path = Library(folder / "library").composition_path()
    chosen = certify(folder / "library", TARGET)
    replace(chosen, exits=tuple(replace(each, threshold=NEVER) for each in chosen.exits)).save(path)


def ask(running: Server, place: str | None, count: int = 16) -> dict[str, Any]:
    parameters = {} if place is None else {"place": place}
    reply = running.client.post(f"/v2/models/{MODEL}/infer", json=request(count, **parameters))
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def exits(document: dict[str, Any]) -> set[str]:
    return set(document["outputs"][3]["data"])


def of_model(running: Server, name: str) -> float:
    return metric(running, f'{name}{{model="{MODEL}"}}')


def part(made: Path) -> dict[str, Any]:
    """What is kept of memory, as the file has it."""
    document = json.loads((made / "library" / "standing" / f"{MODEL}.json").read_text())
    return dict(document["parts"]["memory"]["state"])


@pytest.mark.slow
def test_memory_answers_where_a_place_is_named_and_survives_a_kill(made: Path) -> None:
    """It proves itself first; killed, it soon answers again; without a place nothing is recalled."""
    without_hits(made)
    with serve_to_be_killed(made, audit_budget=1.0, places=2) as running:
        asked = 1
        while "recall" not in exits(document := ask(running, "gate")):
            assert exits(document) == {"base"}
            asked += 1
        while of_model(running, "gati_memory_level") < 1.0:
            ask(running, "gate")
        assert document["parameters"]["promise"].endswith("proven for memory")
        assert "certificate" not in document["parameters"]
        assert exits(ask(running, None)) == {"base"}, "no place, no memory"
        named = running.client.post(
            f"/v2/models/{MODEL}/versions/default/infer", json=request(16, place="gate")
        ).json()
        assert exits(named) == {"base"}, "a version that is named answers itself"
        assert exits(ask(running, "yard")) == {"base"}, "another place knows nothing yet"
        until(lambda: part(made)["ladders"][0]["ladder"]["level"] >= 1)
        until(lambda: (made / "library" / "standing" / f"{MODEL}-memory.npz").exists())
        kill(running)
        # the first requests may still be looked up in caches, next to which less of memory is proven
        soon = any("recall" in exits(ask(running, "gate")) for _ in range(min(3, asked // 2)))
        assert soon, "what was proven is forgotten"
        for place in ("yard", "hall", "gate"):
            ask(running, place)
        until(lambda: of_model(running, "gati_places_forgotten_total") >= 1.0)
        assert of_model(running, "gati_places") == 2.0
        assert of_model(running, "gati_recalled_total") > 0.0
        shown = CliRunner().invoke(app, ["adapt", "status", "--url", running.url])
        # its caches prove themselves on what memory leaves, or have done so
        assert re.search("version default: (serving|probation), active", shown.output), shown.output
        assert "memory: setting " in shown.output and "audits" in shown.output
        document = json.loads(
            CliRunner().invoke(app, ["adapt", "status", "--url", running.url, "--json"]).stdout
        )
        assert document["models"][0]["memory"]["places"] == 2 and document["error"] is None
        wrong = running.client.post(f"/v2/models/{MODEL}/infer", json=request(1, place=7))
        assert wrong.status_code == 400 and "`place` is '7'" in wrong.text
    os.remove(made / "library" / "standing" / f"{MODEL}-memory.npz")
    with serve(made, audit_budget=1.0) as again:  # a proof without what it was made of is none
        assert exits(ask(again, "gate")) == {"base"}


@pytest.mark.slow
def test_lookups_that_do_not_pay_rest(made: Path) -> None:
    without_hits(made)
    resting = f'gati_version_resting{{model="{MODEL}",version="default"}}'
    with serve(made, audit_budget=0.05) as running:
        assert metric(running, resting) == 0.0
        until(lambda: exits(ask(running, None)) == {"base"} and metric(running, resting) == 1.0)
        assert any("lookups pause for a while" in line for line in running.said)


def publish_settings(folder: Path) -> int:
    """A version with three settings, from strict to loose: the loosest alone answers everything."""
    library = Library(folder / "library")
    chosen = Composition.load(library.composition_path())
    loose = tuple(replace(each, threshold=0.0, exit_ms=0.2) for each in chosen.exits)
    strict = tuple(replace(each, threshold=NEVER, exit_ms=0.2) for each in chosen.exits)
    versions = [replace(chosen, exits=each, created="retrained", certificate=None, confidence=None)
                for each in (strict, loose, loose)]  # fmt: skip
    files = {f"caches/{each.trial_id}.safetensors": weights(library, each.trial_id, RIGHT)
             for each in chosen.exits}  # fmt: skip
    files["composition.json"] = versions[-1].to_json().encode()
    for number, each in enumerate(versions, 1):
        files[f"settings/{number}.json"] = each.to_json().encode()
    return ModelRepository(folder / "versions").publish(MODEL, files, Lineage(chosen.checkpoint_sha256))


@pytest.mark.slow
def test_settings_of_a_version_are_released_as_they_are_proven_and_stay_so(made: Path) -> None:
    answering(made, RIGHT)
    certify(made / "library", TARGET)
    number = publish_settings(made)
    ModelRepository(made / "versions").activate(MODEL, number)
    level = f'gati_version_level{{model="{MODEL}",version="{number}"}}'
    with serve_to_be_killed(made, repository=str(made / "versions"), audit_budget=0.5) as running:
        assert metric(running, f'gati_version_settings{{model="{MODEL}",version="{number}"}}') == 3.0
        until(lambda: ask(running, None)["model_version"] == str(number))
        until(lambda: metric(running, level) == 3.0)
        os.kill(running.processes()[MODEL], signal.SIGKILL)
        until(lambda: metric(running, "gati_restarts_total") >= 1.0)
        running.wait_until_ready()
        document = ask(running, None)
        assert document["model_version"] == str(number) and "base" not in exits(document)
        assert metric(running, level) == 3.0
