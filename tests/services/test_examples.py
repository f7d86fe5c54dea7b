"""The example configuration and dashboard that Gati ships."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from typer.main import get_command

from gati.cli import app
from gati.errors import ConfigError
from gati.units import parse_duration
from services.config import ServeConfig, read_config
from tests.services.running import Serving, request


def test_the_example_configuration_can_be_read(repository: Path) -> None:
    found = read_config(repository / "examples" / "serve" / "serve.toml", environment={}).config
    assert found.models["digits"].library is not None and found.port == 8000


def test_what_the_unit_and_the_container_start_is_understood(repository: Path) -> None:
    deploy = repository / "examples" / "deploy"
    unit = (deploy / "gati.service").read_text(encoding="utf-8")
    started = re.findall(r"^ExecStart=\S+/gati serve (.+)$", unit, re.MULTILINE)
    container = (deploy / "Containerfile").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"^CMD (\[.+\])$", container, re.MULTILINE)
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    (stop_s,) = map(int, re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE))
    for words in (*map(str.split, started), json.loads(arguments)):
        given = command.make_context("serve", list(words), resilient_parsing=False).params
        assert parse_duration(given["drain"]) == 10.0
        assert stop_s > 10.0 + 2 * ServeConfig().drain_timeout_s
    stops = r"(?:--stop-timeout|stop_grace_period:|terminationGracePeriodSeconds:) (\d+)"
    for name in ("Containerfile", "README.md", "kuberay.yaml"):  # by default a container is killed before
        found = re.findall(stops, (deploy / name).read_text(encoding="utf-8"))
        assert found and set(found) == {str(stop_s)}, name
    assert f"RestartPreventExitStatus={ConfigError.exit_status}" in unit
    assert "OOMPolicy=continue" in unit, "systemd would end all models when one runs out of memory"


def test_the_image_has_what_is_installed_and_not_the_checkout(repository: Path) -> None:
    container = (repository / "examples" / "deploy" / "Containerfile").read_text(encoding="utf-8")
    copied = {
        word for line in re.findall(r"^COPY (.+) \S+$", container, re.MULTILINE) for word in line.split()
    }
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {
        "pyproject.toml",
        "setup.py",
        project["project"]["readme"],
        *project["project"]["license-files"],
    }
    packages = {each.rstrip("*") for each in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert copied == needed | packages


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
