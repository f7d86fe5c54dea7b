"""Audits, the guard, samples and versions of a repository, in a real inference service."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gati.adapt.lineage import Lineage
from gati.adapt.repository import ModelRepository
from gati.adapt.store import RecordStore
from gati.compose.composition import Composition
from gati.explore.library import Library
from tests.services.running import Serving, make_folder, request
from tests.waiting import LONG_S, until

MODEL = "small"


def serve(folder: Path, **settings: Any) -> Serving:
    lines = [f"{name} = {value!r}".replace("'", '"') for name, value in settings.items()]
    file = folder / "following.toml"
    head = f'[models.{MODEL}]\nlibrary = "library"\nthreads = 1\n'
    file.write_text(head + "\n".join(lines), encoding="utf-8")
    return Serving(file)


def compose(folder: Path, **changes: Any) -> Composition:
    path = Library(folder / "library").composition_path()
    chosen = replace(Composition.load(path), **changes)
    chosen.save(path)
    return chosen


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Path]:
    yield make_folder(tmp_path)


def metric(running: Serving, name: str) -> float:
    for line in running.client.get("/metrics").text.splitlines():
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def test_untrained_caches_are_stopped_by_the_guard_and_the_base_model_answers(made: Path) -> None:
    """Caches at random disagree with the network: the guard must find that, and stop them at once."""
    compose(made, accuracy_target=0.97)
    with serve(made, audit_budget=0.5) as running:
        exits = set()
        deadline_s = time.monotonic() + LONG_S
        while not metric(running, f'gati_caches_stopped{{model="{MODEL}"}}'):
            assert time.monotonic() < deadline_s, "no alarm"
            reply = running.client.post(f"/v2/models/{MODEL}/infer", json=request(16))
            assert reply.status_code == 200, reply.text
            exits.update(reply.json()["outputs"][3]["data"])
        assert exits - {"base"}, "no cache has answered before"
        after = {running.infer(MODEL).json()["parameters"]["exit"] for _ in range(20)}
        assert after == {"base"}
        assert metric(running, f'gati_audits_total{{agreed="false",model="{MODEL}"}}') > 0
        assert any("caches stopped by the guard" in line for line in running.said)


def test_audits_keep_to_their_budget(made: Path) -> None:
    compose(made, accuracy_target=0.5)
    with serve(made, audit_budget=0.05) as running:
        hits = sum(running.infer(MODEL).json()["parameters"]["from_cache"] for _ in range(300))
        assert hits > 100

        def audits() -> float:
            return sum(
                metric(running, f'gati_audits_total{{agreed="{agreed}",model="{MODEL}"}}')
                for agreed in ("true", "false")
            )

        time.sleep(0.5)
        assert audits() <= 0.05 * 300 + (300 - hits)


def test_samples_are_kept_with_the_base_models_answers(made: Path) -> None:
    url = f"sqlite:///{made}/records.db"
    with serve(made, records=url, sampling=1.0, audit_budget=0.0) as running:
        for _ in range(40):
            assert running.client.post(f"/v2/models/{MODEL}/infer", json=request(2)).status_code == 200
        with RecordStore.open(url) as store:
            until(lambda: store.count(MODEL) >= 60)
            found = store.window(MODEL)
    assert {record.kind for record in found} == {"image"} and found[0].input.shape == (6, 6, 1)
    assert any(record.exit for record in found)
    for record in found:
        assert record.probabilities is not None
        assert int(np.argmax(record.probabilities)) == record.base_class
        assert (record.agreed is None) == (record.exit is None)


def test_what_is_activated_in_the_repository_is_served_without_a_restart(made: Path) -> None:
    library = Library(made / "library")
    chosen = compose(made)
    repository = ModelRepository(made / "versions")

    def publish(thresholds: float) -> int:
        exits = tuple(replace(leaving, threshold=thresholds) for leaving in chosen.exits)
        files = {
            f"caches/{leaving.trial_id}.safetensors": library.cache_path(leaving.trial_id).read_bytes()
            for leaving in exits
        }
        files["composition.json"] = replace(chosen, exits=exits).to_json().encode()
        return repository.publish(MODEL, files, Lineage(chosen.checkpoint_sha256))

    always, never = publish(0.0), publish(2.0)
    repository.activate(MODEL, always)
    with serve(made, repository=str(made / "versions"), audit_budget=0.0) as running:

        def answer() -> tuple[str, bool]:
            document = running.infer(MODEL).json()
            return document["model_version"], document["parameters"]["from_cache"]

        assert answer() == (str(always), True)
        repository.activate(MODEL, never)
        until(lambda: answer() == (str(never), False))
        assert repository.rollback(MODEL) == always
        until(lambda: answer() == (str(always), True))
        assert running.client.get(f"/v2/models/{MODEL}").json()["versions"] == ["default", str(always)]
