"""The full loop with real processes: requests, samples, retraining, proof, and a new serving version."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from gati.versions.repository import ModelRepository
from tests.adaptation.deployed import STRANGE, make_deployed, stream
from tests.services.running import Serving
from tests.waiting import LONG_S

pytestmark = pytest.mark.slow

CONFIG = """
[adaptation]
interval_s = 4.0
look_every_s = 0.5
niceness = 0  # where tests run side by side, an idle processor is rare
window_inputs = 900
[models.digits]
library = "library"
threads = 1
audit_budget = 0.5
proof_s = 1.0
records = "sqlite:///{folder}/records.db"
sampling = 1.0
repository = "versions"
"""


def ask(running: Serving, x: Tensor) -> dict[str, Any]:
    rows = x.numpy()
    tensor = {
        "name": "input",
        "shape": list(rows.shape),
        "datatype": "FP32",
        "data": rows.ravel().tolist(),
    }
    reply = running.client.post("/v2/models/digits/infer", json={"inputs": [tensor]})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def hit_rate(running: Serving, seed: int) -> float:
    exits = ask(running, stream(STRANGE, 60, seed=seed, unseen=True))["outputs"][3]["data"]
    return float(np.mean([name != "base" for name in exits]))


def adaptation_process(running: Serving) -> int | None:
    """The process of this server, not that of another run of the tests on the same machine."""
    listed = subprocess.run(
        ["ps", "-ww", "--ppid", str(running.process.pid), "-o", "pid,args"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    found = [int(line.split()[0]) for line in listed.splitlines() if "-m services.adaptation" in line]
    return found[0] if found else None


def retraining(running: Serving) -> bool:
    model, *_ = running.client.get("/v1/adaptation").json()["models"]
    return bool((model["retraining"] or {}).get("under_way"))


def test_caches_follow_the_stream_though_the_adaptation_is_killed_while_it_trains(tmp_path: Path) -> None:
    make_deployed(tmp_path)
    file = tmp_path / "serve.toml"
    file.write_text(CONFIG.format(folder=tmp_path), encoding="utf-8")
    with Serving(file) as running:
        before = hit_rate(running, seed=100)
        deadline_s = time.monotonic() + 5 * LONG_S
        version, killed, seed = "default", False, 0
        while version == "default" or not killed:
            assert time.monotonic() < deadline_s, "no version was published and served: " + "".join(
                line for line in running.said if "adaptation" in line
            )
            seed += 1
            version = ask(running, stream(STRANGE, 30, seed=seed))["model_version"]
            if not killed and retraining(running) and (process := adaptation_process(running)) is not None:
                os.kill(process, signal.SIGKILL)  # requests go on, and it comes back
                killed = True
            time.sleep(0.2)  # leaves the adaptation some of the machine
        # The guard had stopped the caches: the new ones answer once audits have proven them.
        while hit_rate(running, seed=seed + 1000) <= before:
            assert time.monotonic() < deadline_s, "the new version was never proven"
            seed += 1
        parameters = ask(running, stream(STRANGE, 1, seed=seed))["parameters"]
        assert "certificate" not in parameters, "a retrained version has none"
        assert "proven on" in parameters["promise"] or "stopped" in parameters["promise"]
        repository = ModelRepository(tmp_path / "versions")
        active = repository.active("digits")
        assert active is not None
        lineage = repository.version("digits", active).lineage
        assert lineage.window is not None and not lineage.measurements["after"]["broken"]
