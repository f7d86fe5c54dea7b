"""`gati serve` whose processes are killed at every stage of the life of a version, under load."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

from gati.adaptation.deployments import Deployments
from gati.composition.composition import Composition
from gati.composition.load import Served
from gati.composition.walk import certify as walk
from gati.engine.exits import BASE
from gati.exploration.library import Library
from gati.samples.store import RecordStore
from gati.versions.repository import ModelRepository
from tests.adaptation.deployed import STRANGE, make_deployed, stream
from tests.conftest import REPOSITORY
from tests.services.dying import Reaper
from tests.services.running import Serving
from tests.services.test_adaptation import CONFIG
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.slow

MODEL = "digits"
INPUTS = 400
AGREEMENT = 0.9  # proven on half as many audits as 0.95
# `test_killed` has all changes of files. Here a version is activated, fetched, tried and proven, one stops.
STAGES = r"activated|fetched|serving: serving|serving: stopped|serving: \w+, (trial: \w+)"


class Answers:
    """A client that asks for different inputs, one after the other, and keeps what it is answered."""

    def __init__(self, url: str, inputs: Tensor) -> None:
        self.rows: list[tuple[int, str, str, int]] = []  # input, version, exit, class
        self.refused: list[tuple[int, str]] = []
        self.errors: list[str] = []
        self._url = f"{url}/v2/models/{MODEL}/infer"
        self._inputs = inputs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * LONG_S)
        assert not self._thread.is_alive(), "a request hangs"

    def _ask(self) -> None:
        with httpx.Client(timeout=LONG_S) as client:
            for number in range(10**9):
                if self._stop.is_set():
                    return
                at = number % len(self._inputs)
                x = self._inputs[at : at + 1]
                tensor = {
                    "name": "input",
                    "shape": list(x.shape),
                    "datatype": "FP32",
                    "data": x.ravel().tolist(),
                }
                try:
                    reply = client.post(self._url, json={"inputs": [tensor]})
                except httpx.HTTPError as error:
                    self.errors.append(repr(error))
                    continue
                document = reply.json()
                if reply.status_code != 200:
                    self.refused.append((reply.status_code, str(document.get("error", ""))))
                    time.sleep(0.05)
                    continue
                outputs = {each["name"]: each["data"] for each in document["outputs"]}
                self.rows.append(
                    (at, document["model_version"], outputs["exit"][0], outputs["class_index"][0])
                )
                time.sleep(0.03)  # what retrains is less urgent, and needs some of the machine


class Evidence:
    """What the state file says over time: proofs must not shrink, and shares of delta must not grow alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.proofs: dict[tuple[str, int], int] = defaultdict(int)  # audits by version and spent shares
        self.spent = 0
        self.lost: list[str] = []

    def look(self) -> None:
        """Read the file as it is now."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        if document["spent"] < self.spent:
            self.lost.append(f"{self.spent} shares of delta were spent, now it is {document['spent']}")
        self.spent = document["spent"]
        for name, each in document["versions"].items():
            audits = sum(proof["audits"] for proof in each.get("proofs") or [each["proof"] or {"audits": 0}])
            key = name, self.spent
            if each["state"] == "probation" and audits < self.proofs[key]:
                self.lost.append(f"{self.proofs[key]} audits of {name} were counted, now it is {audits}")
            self.proofs[key] = max(self.proofs[key], audits)


def compose(library: Library) -> None:
    """Let the library's composition promise `AGREEMENT`."""
    path = library.composition_path()
    certificate = walk([(20, 1000)], AGREEMENT, 0.05)
    replace(Composition.load(path), accuracy_target=AGREEMENT, certificate=certificate).save(path)


def status(running: Serving) -> dict[str, Any]:
    """How the model adapts."""
    return dict(running.client.get("/v1/adaptation").json()["models"][0])


def test_killed_at_every_stage_the_service_loses_nothing_and_ends_where_it_would(tmp_path: Path) -> None:
    """Both processes die before each stage is in a file, then again after it has shown."""
    served = make_deployed(tmp_path)
    inputs = stream(STRANGE, INPUTS, seed=5)
    file = tmp_path / "serve.toml"
    config = CONFIG.format(folder=tmp_path).replace("interval_s = 4.0", "interval_s = 8.0")
    file.write_text(config, encoding="utf-8")  # a version has three intervals to be proven
    compose(Library(tmp_path / "library"))
    reaper = Reaper(tmp_path / "reaper", STAGES)
    path = os.pathsep.join((str(reaper.folder), str(REPOSITORY)))
    evidence = Evidence(tmp_path / "library" / "standing" / f"{MODEL}.json")
    killed: set[str] = set()

    def kill_once(why: str, pid: int | None) -> None:
        if why not in killed and pid is not None:
            killed.add(why)
            os.kill(pid, signal.SIGKILL)

    with Serving(file, environment={"PYTHONPATH": path}) as running:

        def proven() -> bool:
            """Whether a retrained version serves; meanwhile, kills what is at a stage that can be seen."""
            evidence.look()
            found = status(running)
            if (found["retraining"] or {}).get("under_way"):
                assert abs(found["retraining"]["began_s"] - time.time()) < LONG_S
            for version in found["versions"]:
                audits = (version["proof"] or {"audits": 0})["audits"]
                if version["pending"] and audits >= 10:
                    kill_once("service while it proves", running.processes().get(MODEL))
                if version["active"] and version["version"] != "default" and version["state"] == "serving":
                    if "service that has swapped" in killed:
                        return True
                    kill_once("service that has swapped", running.processes().get(MODEL))
            return False

        with Answers(running.url, inputs) as answers:
            until(proven, timeout_s=2 * LONG_S, every_s=0.05)
            said = len(answers.rows)
            until(lambda: len(answers.rows) > said + 40)
    assert {"activated", "fetched", "serving: serving", "trial: probation"} <= set(reaper.died)
    assert len(killed) == 2
    assert not evidence.lost and not answers.errors
    assert {code for code, _ in answers.refused} <= {503, 504}, answers.refused[-5:]
    repository = ModelRepository(tmp_path / "versions")
    check_answers(served, repository, inputs, answers, tmp_path)
    check_samples(served, tmp_path, inputs)


def check_answers(
    served: Served, repository: ModelRepository, inputs: Tensor, answers: Answers, folder: Path
) -> None:
    """Each answer is the base model's, or that of a cache of the version that answered, for that input."""
    (folder / "opened").mkdir()
    deployments = Deployments(served, repository, MODEL, folder / "opened")
    base = [each.class_index for each in served.engine.base(inputs)]
    early: dict[str, dict[str, list[set[int]]]] = {}
    whole = {str(version.version) for version in repository.versions(MODEL)} | {"default"}
    assert {version for _, version, _, _ in answers.rows} <= whole, "a version answered that is not whole"
    for at, version, exit, class_index in answers.rows:
        if exit == BASE or class_index == base[at]:
            assert class_index == base[at], "a request got another one's answer"
            continue
        if version not in early:
            early[version] = caches(deployments, version, inputs)
        assert class_index in early[version][exit][at], "no cache gives this answer to this input"


def caches(deployments: Deployments, version: str, inputs: Tensor) -> dict[str, list[set[int]]]:
    """What the caches of a version say of each input in any setting, by the block that they are at."""
    number = 0 if version == "default" else int(version)
    levels = range(1, len(deployments.open(number).settings) + 1)
    found: dict[str, list[set[int]]] = defaultdict(lambda: [set() for _ in inputs])
    for deployed in (deployments.open(number), *(deployments.at(number, level) for level in levels)):
        with torch.inference_mode():
            for at, each in enumerate(deployed.served.engine(inputs)):
                if each.exit != BASE:
                    found[each.exit][at].add(each.class_index)
    return found


def check_samples(served: Served, folder: Path, inputs: Tensor) -> None:
    """Samples are whole, and none has another request's answer."""
    with RecordStore.open(f"sqlite:///{folder}/records.db") as store:
        records = store.window(MODEL)
    known = {x.numpy().tobytes(): at for at, x in enumerate(inputs)}
    base = [each.class_index for each in served.engine.base(inputs)]
    assert len(records) > 100
    for record in records:
        at = known[np.ascontiguousarray(record.input, dtype=np.float32).tobytes()]
        assert record.base_class == base[at]
