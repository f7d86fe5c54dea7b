"""Queries through a pipeline of real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.running import CLASSES, Serving, png, request

pytestmark = pytest.mark.slow

URL = "/v1/pipelines/sides/query"


def test_an_answer_tells_how_every_stage_went(serving: Serving) -> None:
    found = serving.client.post(URL, json=request(latency_slo_ms=60_000)).json()
    assert found["label"] in CLASSES and found["slo_met"] is True and found["latency_slo_ms"] == 60_000
    axis, second = found["stages"]
    assert axis["stage"] == "axis" and second["stage"] == axis["label"] and second["label"] == found["label"]
    assert found["skipped"] == [{"vertical": "horizontal", "horizontal": "vertical"}[axis["label"]]]
    for stage in found["stages"]:
        assert stage["model"] in ("small", "other") and stage["version"] in ("default", "other")
        assert 0 < stage["latency_ms"] <= found["latency_ms"] and stage["budget_ms"] > 0
        assert stage["from_cache"] is (stage["exit"] != "base")
    assert second["started_ms"] >= axis["started_ms"] + axis["latency_ms"] - 0.1


def ways(image: bytes) -> list[dict[str, Any]]:
    form = {"files": {"image": ("a.png", image)}, "data": {"latency_slo_ms": "60000"}}
    raw = {
        "content": image,
        "params": {"latency_slo_ms": 60_000},
        "headers": {"Content-Type": "image/png"},
    }
    return [{"json": request(latency_slo_ms=60_000)}, form, raw]


def test_tensor_form_and_raw_image_get_the_same_answer(serving: Serving) -> None:
    replies = [serving.client.post(URL, **each).json() for each in ways(png())]
    assert len({reply["label"] for reply in replies}) == 1
    assert {reply["latency_slo_ms"] for reply in replies} == {60_000}


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        ({"content": b""}, 400, "the body is empty"),
        ({"content": b"not an image"}, 400, "not an image that can be read"),
        ({"json": request(2)}, 400, "a query is for one input, got shape [2, 6, 6, 1]"),
        ({"files": {"other": b"x"}}, 400, "the form has no file `image`"),
        ({"content": b"--x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "cannot be parsed"),
        ({"content": png(), "params": {"latency_slo_ms": "soon"}}, 400, "`latency_slo_ms` is 'soon'"),
        ({"content": b"my card", "headers": {"Content-Type": "text/plain"}}, 400, "takes neither text nor"),
        ({"content": b"\xff", "headers": {"Content-Type": "text/plain"}}, 400, "the text is not UTF-8"),
    ],
)
def test_a_broken_query_gets_one_line(
    serving: Serving, sent: dict[str, Any], status: int, message: str
) -> None:
    reply = serving.client.post(URL, **sent)
    assert (reply.status_code, message in reply.json()["error"]) == (status, True), reply.text


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(serving: Serving) -> None:
    assert serving.client.post(URL, content=png(65)).status_code == 413
    read = serving.client.post(URL, content=png(64))  # so many are allowed, but the network takes 6 x 6
    assert read.status_code == 400, read.text


def test_the_priority_of_the_url_counts_for_tensors_too(serving: Serving) -> None:
    refused = serving.client.post(URL, params={"priority": 11}, json=request())
    assert refused.status_code == 400 and "`priority` is 11" in refused.json()["error"]
    assert serving.client.post(URL, params={"priority": 11}, json=request(priority=1)).status_code == 200


def test_pipelines_are_described(serving: Serving) -> None:
    found = serving.client.get("/v1/pipelines").json()["pipelines"][0]
    assert found["name"] == "sides" and found["ready"] and found["outputs"] == ["vertical", "horizontal"]
    assert serving.client.get("/v1/pipelines/none").json()["error"] == "no pipeline 'none'; there are: sides"


def test_an_slo_that_cannot_be_met_is_refused_at_once(serving: Serving) -> None:
    reply = serving.client.post(URL, json=request(latency_slo_ms=0.5, timeout_ms=9000))
    assert reply.status_code == 429 and "Retry-After" in reply.headers


def test_the_command_line_shows_a_tree(serving: Serving, tmp_path: Path, repository: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(png())
    command = [sys.executable, "-m", "gati", "query", "sides", str(image), "--url", serving.url, "--slo"]
    done = subprocess.run([*command, "60s"], capture_output=True, text=True, cwd=repository, check=True)
    said = done.stdout
    assert "SLO met" in said and "axis: " in said and "skipped" in said and "of 60000 ms" in said
    refused = subprocess.run([*command, "100us"], capture_output=True, text=True, cwd=repository, check=False)
    assert refused.returncode == 1
    assert "(status 429); retry in" in refused.stderr or "(status 504)" in refused.stderr


def test_statistics_are_json(serving: Serving) -> None:
    reply = serving.client.get("/v2/models/stats")
    assert reply.status_code == 200
    assert {row["name"] for row in reply.json()["model_stats"]} == {"small", "other"}
