"""The Open Inference Protocol, used by another project's client and by raw requests."""

from __future__ import annotations

import gzip
import json
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image

import gati
from gati.cli import run
from tests.engine.served import PREPROCESSING, images
from tests.services.inside import Inside
from tests.services.running import CLASSES, LARGEST_BODY_BYTES, Serving, make_folder, request
from tests.waiting import LONG_S

pytestmark = pytest.mark.slow


def client_of(serving: Serving | Inside) -> triton.InferenceServerClient:
    """Another project's client, as patient as ours."""
    url = serving.url.removeprefix("http://")
    return triton.InferenceServerClient(url, connection_timeout=LONG_S, network_timeout=LONG_S)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[gati.Prediction]:
    """What the engine says of ten images in this process."""
    with gati.load(folder / "library") as engine:
        return engine(PREPROCESSING(images(10)))


def test_the_query_command_sends_a_picture(
    serving: Serving,
    expected: list[gati.Prediction],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number, pixels in enumerate(images(3)):
        path = tmp_path / f"{number}.png"
        Image.fromarray(pixels[:, :, 0]).convert("RGB").save(path)
        assert run(["query", "small", str(path), "--url", serving.url]) == 0
        said = capsys.readouterr().out
        assert path.name in said and str(expected[number].class_name) in said


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_another_projects_client_gets_the_engines_answers(
    serving: Serving, expected: list[gati.Prediction], binary: bool, compression: str | None
) -> None:
    client = client_of(serving)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("small")
    data = PREPROCESSING(images(10)).numpy()
    given = triton.InferInput("input", list(data.shape), "FP32")
    given.set_data_from_numpy(data, binary_data=binary)
    names = ("probabilities", "class_index", "class_name", "exit")
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
    found = client.infer(
        "small", [given], outputs=outputs, request_id="mine", request_compression_algorithm=compression
    )
    assert found.get_response()["id"] == "mine"
    assert found.as_numpy("class_index").tolist() == [each.class_index for each in expected]
    told = np.stack([each.probabilities.numpy() for each in expected])
    np.testing.assert_allclose(found.as_numpy("probabilities"), told, rtol=1e-4, atol=1e-6)
    exits = [each.decode() if isinstance(each, bytes) else each for each in found.as_numpy("exit")]
    assert exits == [each.exit for each in expected]
    names_found = found.as_numpy("class_name")
    assert [each.decode() if isinstance(each, bytes) else each for each in names_found] == [
        each.class_name for each in expected
    ]


def test_metadata_statistics_and_index_for_another_projects_client(serving: Serving) -> None:
    client = client_of(serving)
    assert client.get_server_metadata()["name"] == "gati"
    found = client.get_model_metadata("small")
    assert found["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 1, 6, 6]}]
    assert found["parameters"]["certificate"]["sentence"].startswith("With 95 % confidence at least ")
    before = client.get_inference_statistics("small")["model_stats"]
    serving.infer()
    after = client.get_inference_statistics("small")["model_stats"][0]
    assert after["inference_count"] == (before[0]["inference_count"] if before else 0) + 1
    assert sum(after["exits"].values()) == after["inference_count"]
    (row,) = client.get_inference_statistics("small", "default")["model_stats"]
    assert row["inference_stats"]["success"]["count"] == row["inference_count"] >= after["inference_count"]
    assert {row["name"] for row in client.get_inference_statistics()["model_stats"]} == {"small", "other"}
    missing = serving.client.get("/v2/models/small/versions/none/stats")
    assert (missing.status_code, missing.json()["error"]) == (
        404,
        "no version 'none' of model 'small' is loaded",
    )
    assert {row["name"]: row["state"] for row in client.get_model_repository_index()} == {
        "small": "READY",
        "other": "READY",
    }


def test_an_answer_tells_where_it_came_from(serving: Serving) -> None:
    reply = serving.infer(latency_slo_ms=60_000)
    parameters = reply.json()["parameters"]
    assert parameters["exit"] in ("body.0", "body.1", "base") or parameters["from_cache"]
    assert parameters["from_cache"] is (parameters["exit"] != "base")
    assert parameters["slo_met"] is True and parameters["latency_ms"] > 0
    assert parameters["certificate"].startswith("With 95 % confidence at least ")


def test_a_version_can_be_named(serving: Serving) -> None:
    url = "/v2/models/small/versions/{}/infer"
    assert serving.client.post(url.format("default"), json=request()).json()["model_version"] == "default"
    missing = serving.client.post(url.format("none"), json=request())
    assert missing.status_code == 404
    assert missing.json()["error"] == "no version 'none' of 'small'; loaded: default"


BROKEN: list[tuple[str, int, Any, str]] = [
    ("no JSON", 400, b"{", "the body is not JSON"),
    ("a list", 400, [], "the body must be a JSON object"),
    ("no inputs", 400, {}, "`inputs` must be a list with one tensor"),
    ("another input", 400, {"inputs": [{"name": "x"}]}, "no input is called 'x'; the input is `input`"),
    ("datatype", 400, {"inputs": [{"name": "input", "datatype": "FP8"}]}, "`datatype` is 'FP8'; choose one"),
    (
        "negative shape", 400, {"inputs": [{"name": "input", "datatype": "FP32", "shape": [-1]}]},
        "`shape` must be a list of whole numbers",
    ),
    (
        "too few numbers", 400,
        {"inputs": [{"name": "input", "datatype": "FP32", "shape": [2], "data": [1]}]},
        "`data` has 1 numbers and shape [2] takes 2",
    ),
    (
        "text", 400, {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1], "data": ["a"]}]},
        "`data` is not a valid FP32 tensor",
    ),
    (
        "out of range", 400,
        {"inputs": [{"name": "input", "datatype": "UINT8", "shape": [1], "data": [256]}]},
        "numbers outside 0 to 255",
    ),
    (
        "too large", 400,
        {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1], "data": [1e300]}]},
        "numbers outside -3.40282",
    ),
    (
        "ragged", 400,
        {"inputs": [{"name": "input", "datatype": "FP32", "shape": [3], "data": [[1], [2, 3]]}]},
        "`data` is not a valid FP32 tensor",
    ),
    (
        "wrong shape", 400,
        {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]},
        "the network takes a tensor of shape [batch, 1, 6, 6], got [1, 2]",
    ),
    (
        "wrong datatype", 400,
        {"inputs": [{"name": "input", "datatype": "INT32", "shape": [1, 1], "data": [1]}]},
        "the input has datatype INT32; send FP32",
    ),
    (
        "empty batch", 400,
        {"inputs": [{"name": "input", "datatype": "FP32", "shape": [0, 1, 6, 6], "data": []}]},
        "a batch of 0 inputs; send 1 to 16",
    ),
    ("priority", 400, request() | {"parameters": {"priority": 99}}, "`priority` is 99; give a whole number"),
    ("slo", 400, request() | {"parameters": {"latency_slo_ms": -1}}, "`latency_slo_ms` is '-1'; give"),
    ("output", 400, request() | {"outputs": [{"name": "y"}]}, "no output is called 'y'; there are"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "message"), [pytest.param(*row[1:], id=row[0]) for row in BROKEN])
def test_a_broken_request_gets_one_line(serving: Serving, status: int, body: Any, message: str) -> None:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    reply = serving.client.post("/v2/models/small/infer", **sent)  # type: ignore[arg-type]
    error = reply.json()["error"]
    assert (reply.status_code, message in error, "\n" in error) == (status, True, False), error


def test_values_that_are_not_finite_are_refused(serving: Serving) -> None:
    data = np.full((1, 1, 6, 6), np.nan, np.float32)
    given = triton.InferInput("input", list(data.shape), "FP32")
    given.set_data_from_numpy(data)
    client = client_of(serving)
    with pytest.raises(triton.InferenceServerException, match="not finite"):
        client.infer("small", [given])


def test_bodies_are_bounded_packed_and_unpacked(serving: Serving) -> None:
    url, largest = "/v2/models/small/infer", LARGEST_BODY_BYTES
    assert serving.client.post(url, content=b" " * (largest + 1)).status_code == 413
    chunks = serving.client.post(url, content=(b" " * (largest // 4) for _ in range(5)))
    packed = serving.client.post(
        url, content=gzip.compress(b" " * 2 * largest), headers={"Content-Encoding": "gzip"}
    )
    assert (chunks.status_code, packed.status_code) == (413, 413)
    assert f"larger than {largest} bytes" in packed.json()["error"]
    cut = gzip.compress(b"{}")[:-9]
    assert serving.client.post(url, content=cut, headers={"Content-Encoding": "gzip"}).status_code == 400
    strange = serving.client.post(url, content=b"{}", headers={"Content-Encoding": "br"})
    assert (strange.status_code, serving.infer().status_code) == (400, 200)


def test_a_deadline_and_an_slo_that_cannot_be_met(serving: Serving) -> None:
    hopeless = serving.infer(latency_slo_ms=0.01, timeout_ms=9000)
    assert hopeless.status_code == 429 and int(hopeless.headers["Retry-After"]) >= 1
    assert serving.infer(timeout_ms=0.001).status_code in (504, 429)


def test_unknown_places_and_methods_are_told_in_json(serving: Serving) -> None:
    found = serving.client.get("/v2/models/none").json()["error"]
    assert found == "no model 'none'; there are: small, other; pipelines: sides"
    assert serving.client.get("/nowhere").status_code == 404
    assert serving.client.put("/v2").json()["error"].startswith("the method PUT is not allowed here")


def test_versions_are_loaded_activated_and_unloaded(tmp_path: Path) -> None:
    with Inside(make_folder(tmp_path) / "library") as running:
        client = client_of(running)
        load, unload = "/v2/repository/models/library/load", "/v2/repository/models/library/unload"
        done = running.client.post(load, json={"parameters": {"composition": "other"}})
        assert done.json().items() >= {"name": "library", "version": "other", "pending": False}.items()
        assert running.infer("library").json()["model_version"] == "other"
        assert running.client.get("/v2/models/library").json()["versions"] == ["default", "other"]
        active = running.client.post(unload, json={"parameters": {"version": "other"}})
        assert (active.status_code, "is the active one" in active.json()["error"]) == (400, True)
        assert running.client.post(unload, json={"parameters": {"version": "default"}}).status_code == 200
        assert running.client.get("/v2/models/library/versions/default").status_code == 404
        refusals = ({"composition": "../x"}, 400), ({"composition": "none"}, 409), ({"a": "b"}, 400)
        for parameters, status in refusals:
            refused = running.client.post(load, json={"parameters": parameters})
            assert refused.status_code == status and "/" not in refused.json()["error"].replace("'../x'", "")
        client.unload_model("library")
        gone = running.infer("library")
        assert (gone.status_code, gone.json()["error"]) == (
            503, "model 'library' does not answer: it was unloaded"
        )  # fmt: skip
        client.load_model("library")
        assert running.infer("library").status_code == 200


def test_a_model_that_could_not_be_loaded_is_unloaded_and_can_be_loaded_once_it_is_mended(
    tmp_path: Path,
) -> None:
    """The server was not ready from then on, and to load it again failed with the old reason."""
    library = make_folder(tmp_path) / "library"
    composition = library / "compositions" / "default.json"
    right = composition.read_bytes()
    load, unload = (f"/v2/repository/models/library/{verb}" for verb in ("load", "unload"))
    with Inside(library) as running:
        assert running.client.post(unload, json={}).status_code == 200
        composition.write_bytes(b"{")
        refused = running.client.post(load, json={})
        assert refused.status_code == 400 and "default.json is damaged" in refused.json()["error"]
        assert running.client.get("/v2/health/ready").json() == {
            "ready": True,
            "waiting_for": {"library": "unloaded"},
        }
        composition.write_bytes(right)
        assert running.client.post(load, json={}).status_code == 200
        assert running.infer("library").status_code == 200


def test_keys_for_requests_and_for_management(folder: Path) -> None:
    keys = {"GATI_SERVE_API_KEY": "one", "GATI_SERVE_MANAGEMENT_KEY": "two"}
    with Inside(folder / "library", environment=keys) as running:

        def status(path: str, key: str) -> int:
            return running.client.post(path, json={}, headers={"X-API-Key": key}).status_code

        assert running.infer("library").status_code == 401
        assert status("/v2/models/library/infer", "one") == 400  # past the door
        assert status("/v2/repository/index", "one") == 401
        assert status("/v2/repository/index", "two") == 200
        assert running.client.get("/v2/health/ready").status_code == 200
        assert running.client.get("/metrics").status_code == 200
        page = running.client.get("/docs")
        assert page.status_code == 401 and page.headers["WWW-Authenticate"].startswith("Basic ")
        for password, expected in (("one", 200), ("two", 401), ("", 401)):
            for path in ("/docs", "/dashboard/library/"):
                assert running.client.get(path, auth=("anybody", password)).status_code == expected
        for nonsense in ("Basic", "Basic one", "Basic ////", "Bearer two"):
            assert running.client.get("/docs", headers={"Authorization": nonsense}).status_code == 401
        assert running.client.get("/docs", headers={"Authorization": "Bearer one"}).status_code == 200
        infer = "/v2/models/library/infer"
        assert running.client.post(infer, json={}, auth=("anybody", "one")).status_code == 401


def test_metrics_of_all_processes_on_one_page(serving: Serving) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def counts() -> dict[tuple[str, str], float]:
        page = serving.client.get("/metrics").text
        return {
            (sample.name, sample.labels.get("model", "")): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.labels.get("block", "base") == "base"
        }

    serving.infer("other")
    before = counts()
    serving.infer("other")
    after = counts()
    for name in ("gati_queue_seconds_count", "gati_request_seconds_count"):
        assert after[name, "other"] == before[name, "other"] + 1
    assert after["gati_ready", "small"] == 1 and after["gati_resident_bytes", "other"] > 10**7


def test_documentation_needs_no_network(serving: Serving) -> None:
    page = serving.client.get("/docs").text
    assert "cdn" not in page and "http" not in page.replace("http-equiv", "").replace(serving.url, "")
    assert serving.client.get("/static-offline-docs/swagger-ui-bundle.js").status_code == 200
    paths = serving.client.get("/openapi.json").json()["paths"]
    assert "/v1/pipelines/{pipeline}/query" in paths and "/v2/models/{model}/infer" in paths


def test_documentation_works_behind_a_proxy_that_removes_a_prefix(serving: Serving) -> None:
    """The page asked the proxy for paths without the prefix, and showed nothing."""
    page = serving.client.get("/docs").text
    links = re.findall(r"""(?:src=|href=|url: )["'](.*?)["']""", page)
    assert len(links) == 4
    for link in links:
        path = urljoin("/prefix/docs", link)
        assert path.startswith("/prefix/")
        assert serving.client.get(path.removeprefix("/prefix")).status_code == 200
    (server,) = serving.client.get("/openapi.json").json()["servers"]
    assert urljoin("/prefix/openapi.json", server["url"]) == "/prefix/"


def test_every_model_has_a_live_page(serving: Serving) -> None:
    page = serving.client.get("/dashboard", follow_redirects=True)
    assert page.status_code == 200 and str(page.url).endswith("/dashboard/small/")
    serving.infer()
    with serving.client.stream("GET", "/dashboard/small/events") as events:
        told = next(line for line in events.iter_lines() if line.startswith("data:"))
    assert "layer" in told or "base" in told


def test_the_trace_goes_through(serving: Serving) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    reply = serving.client.post("/v1/pipelines/sides/query", json=request(), headers=headers)
    assert reply.json()["trace_id"] == trace


def test_class_names_are_those_of_the_library(serving: Serving) -> None:
    found = serving.infer().json()
    names = {each["name"]: each["data"] for each in found["outputs"]}
    assert names["class_name"] == [CLASSES[names["class_index"][0]]]


def test_a_client_that_goes_leaves_no_work_behind(serving: Serving) -> None:
    address, body = urlsplit(serving.url), json.dumps(request(16)).encode()
    head = f"POST /v2/models/small/infer HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
    assert serving.infer().status_code == 200
