"""Audits, the guard, proofs, samples and versions of a repository, in a real inference service."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gati.caches import load_cache, save_cache
from gati.composition.composition import Composition
from gati.composition.load import open_served
from gati.composition.walk import certify as walk
from gati.engine.backends import BACKENDS
from gati.errors import ConfigError
from gati.exploration.library import Library
from gati.samples.store import RecordStore
from gati.versions.lineage import Lineage
from gati.versions.repository import ModelRepository
from services.config import read_config
from tests.engine.served import images
from tests.services.inside import Inside
from tests.services.running import Serving, certify, make_folder, request
from tests.waiting import until

pytestmark = pytest.mark.slow

MODEL = "small"
TARGET = 0.9  # proven on 44 audits or so without a loss
RIGHT, WRONG = 1, 2  # what the network answers to every image of the tests, and what it does not


Server = Serving | Inside


def configured(folder: Path, **settings: Any) -> Path:
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    file = folder / "following.toml"
    head = f'[models.{MODEL}]\nlibrary = "library"\nthreads = 1\nproof_s = 1.0\n'
    file.write_text(head + "\n".join(lines), encoding="utf-8")
    return file


def serve(folder: Path, **settings: Any) -> Inside:
    return Inside(configured(folder, **settings))


def serve_to_be_killed(folder: Path, **settings: Any) -> Serving:
    return Serving(configured(folder, **settings))


def compose(folder: Path, **changes: Any) -> Composition:
    path = Library(folder / "library").composition_path()
    chosen = replace(Composition.load(path), **changes)
    chosen.save(path)
    return chosen


def uncertified(folder: Path) -> Composition:
    return compose(folder, accuracy_target=TARGET, certificate=None, confidence=None)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Path]:
    yield make_folder(tmp_path)


def weights(library: Library, trial_id: Any, answer: int) -> bytes:
    """The weights of a cache that always answers one class, and is sure of it."""
    cache = load_cache(library.cache_path(trial_id))
    last = [layer for layer in cache.predictor.modules() if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(50.0 * nn.functional.one_hot(torch.tensor(answer), len(last.bias)))
    path = library.directory.parent / "answering.safetensors"
    save_cache(path, cache)
    return path.read_bytes()


def answering(folder: Path, answer: int) -> None:
    """Let all caches of the library answer one class."""
    library = Library(folder / "library")
    for leaving in Composition.load(library.composition_path()).exits:
        library.cache_path(leaving.trial_id).write_bytes(weights(library, leaving.trial_id, answer))


def publish(folder: Path, answer: int, target: float = TARGET, created: str = "") -> int:
    """Publish caches that always answer one class, as a retraining would: with a certificate of its own."""
    library = Library(folder / "library")
    chosen = Composition.load(library.composition_path())
    certificate = walk([(0, 1500)], target, 0.05)
    changed = replace(
        chosen, accuracy_target=target, confidence=0.95, certificate=certificate, name="retrained",
        created=created or f"retrained {answer}",
    )  # fmt: skip
    files = {
        f"caches/{leaving.trial_id}.safetensors": weights(library, leaving.trial_id, answer)
        for leaving in chosen.exits
    }
    files["composition.json"] = changed.to_json().encode()
    repository = ModelRepository(folder / "versions")
    return repository.publish(MODEL, files, Lineage(chosen.checkpoint_sha256))


def metric(running: Server, name: str) -> float:
    for line in running.client.get("/metrics").text.splitlines():
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def audits(running: Server, agreed: bool, what: str = "audits") -> float:
    return metric(running, f'gati_{what}_total{{agreed="{str(agreed).lower()}",model="{MODEL}"}}')


def ask(running: Server, count: int = 16, version: str | None = None) -> dict[str, Any]:
    where = f"/v2/models/{MODEL}" + (f"/versions/{version}" if version else "")
    reply = running.client.post(f"{where}/infer", json=request(count))
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def exits(document: dict[str, Any]) -> set[str]:
    return set(document["outputs"][3]["data"])


def standing(running: Server) -> dict[str, Any]:
    running.client.get("/metrics")  # which asks the service
    return dict(running.client.get(f"/v2/models/{MODEL}").json()["parameters"])


def shown(running: Server) -> dict[str, Any]:
    """What a page of the model is told when it opens."""
    with running.client.stream("GET", f"/dashboard/{MODEL}/events") as response:
        data = next(line for line in response.iter_lines() if line.startswith("data: "))
    return dict(json.loads(data.removeprefix("data: ")))


def kill(running: Serving) -> None:
    """End the inference process as a crash would, and wait until the next one answers."""
    restarts = metric(running, "gati_restarts_total")
    os.kill(running.processes()[MODEL], signal.SIGKILL)
    until(lambda: metric(running, "gati_restarts_total") > restarts)
    running.wait_until_ready()


def written(made: Path) -> list[dict[str, Any]]:
    """How the versions stand, as the file has it."""
    document = json.loads((made / "library" / "standing" / f"{MODEL}.json").read_text())
    return list(document["versions"].values())


def proof_written(made: Path, running: Server) -> int:
    """Ask, for evidence is written with audits and no oftener than every second; how much is written."""
    ask(running, 1)
    return max((each["proof"] or {"audits": 0})["audits"] for each in written(made))


def stopped(running: Server) -> bool:
    return metric(running, f'gati_caches_stopped{{model="{MODEL}"}}') == 1.0


# --- the guard ------------------------------------------------------------------------------------------


def test_the_guard_stops_caches_for_good_though_the_process_is_killed(made: Path) -> None:
    """Caches that are wrong are found, stopped at once, and not freed by a restart of anything."""
    answering(made, WRONG)
    certify(made / "library", 0.97)
    with serve_to_be_killed(made, audit_budget=0.5) as running:
        seen = set()
        while not stopped(running):
            seen |= exits(ask(running))
        assert seen - {"base"}, "no cache has answered before"
        after = running.infer(MODEL).json()
        assert after["parameters"]["exit"] == "base" and "certificate" not in after["parameters"]
        assert after["parameters"]["promise"].startswith("stopped by the guard: ")
        assert audits(running, False) > 0
        assert any("caches stopped by the guard" in line for line in running.said)
        kill(running)
        assert exits(ask(running)) == {"base"} and stopped(running)
    with serve(made, audit_budget=0.0) as again:  # of everything, with the guard switched off
        assert exits(ask(again)) == {"base"}


def test_audits_keep_to_their_share_of_all_requests(made: Path) -> None:
    """The rate depends on the budget alone, not on hits."""
    answering(made, RIGHT)
    certify(made / "library", 0.97)
    with serve(made, audit_budget=0.05) as running:
        hits = sum(running.infer(MODEL).json()["parameters"]["from_cache"] for _ in range(600))
        assert hits == 600
        until(lambda: audits(running, True) >= 5)
        assert audits(running, True) <= 65  # 30 on average, one in 10,000,000 is beyond


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
        assert record.probabilities is not None and record.source == "default"
        assert int(np.argmax(record.probabilities)) == record.base_class
        assert (record.agreed is None) == (record.exit is None)


# --- proofs ---------------------------------------------------------------------------------------------


def test_unproven_caches_answer_only_once_audits_have_proven_them(made: Path) -> None:
    """The base model answers meanwhile, operators see how far it is, and a kill loses next to nothing."""
    answering(made, RIGHT)
    uncertified(made)
    with serve_to_be_killed(made, audit_budget=0.05, trials=0.2) as running:
        document = ask(running)
        assert exits(document) == {"base"}
        assert document["parameters"]["promise"].startswith("on probation: ")
        assert "certificate" not in document["parameters"]
        while (standing(running)["proof"] or {"audits": 99})["audits"] < 12:
            assert exits(ask(running, 4)) == {"base"}
            time.sleep(0.02)
        until(lambda: proof_written(made, running) >= 12, every_s=0.1)
        before = standing(running)["proof"]
        kill(running)
        after = standing(running)["proof"]
        assert before["audits"] - 20 <= after["audits"] and after["audits"] >= 12
        assert after["needed"] == before["needed"]
        until(lambda: exits(ask(running)) - {"base"} != set())
        promised = running.infer(MODEL).json()["parameters"]["promise"]
        assert promised.startswith("at least 90 % of answers are the base model's, proven on ")
        state = f'gati_version_state{{model="{MODEL}",state="serving",version="default"}}'
        assert metric(running, state) == 1.0
        assert any("caches proven" in line for line in running.said)
        kill(running)
        assert exits(ask(running)) - {"base"} and standing(running)["promise"] == promised


def test_wrong_caches_are_never_proven(made: Path) -> None:
    answering(made, WRONG)
    uncertified(made)
    with serve(made, audit_budget=0.5, trials=1.0) as running:
        while audits(running, False, "trials") < 150:
            assert exits(ask(running)) == {"base"}
        assert audits(running, True) == audits(running, False) == 0, "no answer was an early one"


def test_without_a_guard_unproven_caches_answer_only_if_told_so(made: Path) -> None:
    answering(made, RIGHT)
    uncertified(made)
    with serve(made, audit_budget=0.0) as running:
        for _ in range(5):
            assert exits(ask(running)) == {"base"}
        assert any("cannot be with audit_budget = 0" in line for line in running.said)
        assert audits(running, True, "trials") == 0
    with serve(made, audit_budget=0.0, unguarded=True) as running:
        document = ask(running)
        assert "base" not in exits(document)
        assert document["parameters"]["promise"].startswith("nothing is promised")
    file = made / "wrong.toml"
    file.write_text(f'[models.{MODEL}]\nlibrary = "library"\nunguarded = true\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="give audit_budget = 0 with unguarded = true"):
        read_config(file)


# --- versions -------------------------------------------------------------------------------------------


def test_what_is_activated_in_the_repository_serves_once_it_is_proven(made: Path) -> None:
    """A certificate of its own proves nothing; until then the version before answers."""
    answering(made, RIGHT)
    certify(made / "library", TARGET)
    first, second = publish(made, RIGHT, created="first"), publish(made, RIGHT, created="second")
    repository = ModelRepository(made / "versions")

    def proven(number: int) -> None:
        seen = set()
        while (document := ask(running, 4))["model_version"] != str(number):
            seen.add(document["model_version"])
            assert "base" not in exits(document), "the version before has stopped"
        assert len(seen) == 1 and str(number) not in seen
        assert document["parameters"]["promise"].startswith("at least 90 % of answers are the base model's,")
        assert "proven on" in document["parameters"]["promise"]
        assert "certificate" not in document["parameters"]
        assert "base" not in exits(ask(running))

    with serve_to_be_killed(made, repository=str(made / "versions"), audit_budget=0.3) as running:
        repository.activate(MODEL, first)
        until(lambda: standing(running)["pending"] is not None)
        assert standing(running)["pending"]["version"] == str(first)
        assert standing(running)["active_version"] == "default"
        until(lambda: (shown(running)["proof"] or {}).get("version") == str(first))
        assert shown(running)["proof"]["waits"] and shown(running)["promise"] == TARGET
        named = ask(running, 1, str(first))  # by name, too, the base model answers
        assert (named["model_version"], exits(named)) == (str(first), {"base"})
        proven(first)
        repository.activate(MODEL, second)
        proven(second)
        until(lambda: set(_versions(running)) == {"default", str(second)})
        assert repository.rollback(MODEL) == first  # what was proven of it was proven of other requests
        until(lambda: standing(running)["pending"] is not None)
        assert standing(running)["pending"]["version"] == str(first)
        assert standing(running)["active_version"] == str(second)
        proven(first)
        kill(running)  # it goes on where it was
        document = ask(running)
        assert document["model_version"] == str(first) and "base" not in exits(document)
        repository.activate(MODEL, second)
        until(lambda: standing(running)["pending"] is not None)
        kill(running)  # also while another one, which is active in the repository, is on trial
        document = ask(running, 1)
        assert document["model_version"] == str(first) and "base" not in exits(document)
        assert standing(running)["pending"]["version"] == str(second)


def _versions(running: Server) -> list[str]:
    running.client.get("/metrics")
    return list(running.client.get(f"/v2/models/{MODEL}").json()["versions"])


def test_a_version_that_is_wrong_never_takes_over_and_touches_nobody_elses_watch(made: Path) -> None:
    answering(made, RIGHT)
    certify(made / "library", TARGET)
    bad = publish(made, WRONG)
    repository = ModelRepository(made / "versions")
    repository.activate(MODEL, bad)
    with serve(made, repository=str(made / "versions"), audit_budget=1.0) as running:
        while audits(running, False, "trials") < 100:
            document = ask(running)
            assert (document["model_version"], "base" in exits(document)) == ("default", False)
        for _ in range(10):  # nor is the guard of the one that serves told of requests that name another
            assert exits(ask(running, 16, str(bad))) == {"base"}
        assert audits(running, False) == 0 and audits(running, True) > 0
        until(lambda: proof_written(made, running) > 0)
        states = {each["state"]: each for each in written(made)}
        assert set(states) == {"serving", "probation"}
        assert states["serving"]["losses"] == 0 and states["serving"]["guard"]["losses"] == 0
        assert states["probation"]["proof"]["audits"] == states["probation"]["proof"]["losses"]


def test_loading_another_version_forgets_nothing_of_the_first(made: Path) -> None:
    """Evidence against the version that serves stays though others are loaded, activated and asked."""
    answering(made, WRONG)
    certify(made / "library", 0.97)
    library = Library(made / "library")
    other = library.composition_path().with_name("empty.json")
    replace(Composition.load(library.composition_path()), name="empty", exits=()).save(other)
    load = f"/v2/repository/models/{MODEL}/load"
    with serve(made, audit_budget=0.5) as running:
        while not stopped(running):
            ask(running)
        running.client.post(load, json={"parameters": {"composition": "empty"}}).raise_for_status()
        assert ask(running, 1)["model_version"] == "empty" and not stopped(running)
        again = running.client.post(load, json={"parameters": {"composition": "default"}}).json()
        assert (again["state"], again["pending"]) == ("stopped", True)
        assert ask(running, 1)["model_version"] == "empty"
        assert exits(ask(running, 4, "default")) == {"base"}


# --- reduced precision ----------------------------------------------------------------------------------


@pytest.mark.skipif(
    not BACKENDS["openvino-bf16"].installed(), reason="no OpenVINO, or no processor that computes in bfloat16"
)
def test_in_reduced_precision_misses_are_audited_against_float32(made: Path) -> None:
    """Caches that never hit lose nothing; the network itself does, in bfloat16, and the guard sees it."""
    chosen = certify(made / "library", 0.97)
    never = tuple(replace(leaving, threshold=2.0) for leaving in chosen.exits)
    compose(made, exits=never, backend="openvino-bf16")
    served = open_served(made / "library")
    exact = served.model.base()
    rows = _between(exact)
    classes = [each.class_index for each in exact.base(rows)]
    differ = [k for k, each in enumerate(served.engine.base(rows)) if each.class_index != classes[k]]
    assert len(differ) >= 5, "bfloat16 answers as float32 does, even here"
    differ = differ[:16]
    given = rows[differ]
    tensor = {"name": "input", "shape": list(given.shape), "datatype": "FP32", "data": given.ravel().tolist()}

    def answers(running: Server) -> list[int]:
        reply = running.client.post(f"/v2/models/{MODEL}/infer", json={"inputs": [tensor]})
        assert reply.status_code == 200 and reply.json()["parameters"]["exit"] == "base"
        return list(reply.json()["outputs"][1]["data"])

    with serve(made, audit_budget=1.0) as running:
        asked = 0
        while not stopped(running):
            answers(running)
            asked += len(differ)
            assert asked < 3000, "the guard sees nothing"
        assert audits(running, False) > 0
        # now it is the float32 network that answers
        assert answers(running) == [classes[k] for k in differ]


def _between(engine: Any, count: int = 40) -> torch.Tensor:
    """Inputs so close to where two classes meet that rounding decides."""
    rng = np.random.default_rng(0)
    shape = (200, *engine.traced.input_shape)
    x = torch.from_numpy((10.0 * rng.normal(size=shape)).astype(np.float32))
    found = engine.base(x)
    first = found[0].class_index
    ends = [[row for row, each in zip(x, found, strict=True) if (each.class_index == first) is side]
            for side in (True, False)]  # fmt: skip
    low, high = (torch.stack(each[:count]) for each in ends)
    for _ in range(18):
        middle = (low + high) / 2
        own = torch.tensor([each.class_index == first for each in engine.base(middle)])[:, None, None, None]
        low, high = torch.where(own, middle, low), torch.where(own, high, middle)
    return torch.cat((low, high))


def test_images_of_the_tests_are_all_of_one_class(made: Path) -> None:
    """What the tests above rely on."""
    engine = open_served(made / "library").engine
    assert engine.preprocessing is not None
    assert {each.class_index for each in engine.base(engine.preprocessing(images(16)))} == {RIGHT}
