"""The configuration and the dashboard that come with Gati."""

from __future__ import annotations

import json
import re
from pathlib import Path

from services.config import read_config
from tests.services.running import Serving, request


def test_the_example_configuration_can_be_read(repository: Path) -> None:
    found = read_config(repository / "examples" / "serve" / "serve.toml", environment={}).config
    assert found.models["digits"].library is not None and found.port == 8000


def test_the_dashboard_shows_metrics_that_exist(repository: Path, serving: Serving) -> None:
    serving.client.post("/v1/pipelines/sides/query", json=request(latency_slo_ms=2000))
    serving.infer()
    serving.infer(latency_slo_ms=0.01)
    page = serving.client.get("/metrics").text
    known = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    known |= {f"{name}_{part}" for name in known for part in ("bucket", "count", "sum", "total")}
    dashboard = json.loads((repository / "examples" / "serve" / "grafana.json").read_text(encoding="utf-8"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"gati_\w+", target["expr"])
    }
    assert asked and asked <= known, asked - known
