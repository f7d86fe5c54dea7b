"""Traces and metrics reach a collector in OpenTelemetry's format; requests never wait for it."""

from __future__ import annotations

import asyncio
import gzip
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from gati.errors import ConfigError
from services.config import ServeConfig, read_config
from services.eviction.app import EvictionState, create_eviction_app
from services.eviction.continuations import Continuations
from services.scheduler.app import create_app
from services.scheduler.front import Front
from services.scheduler.models import Model
from services.scheduler.scheduler import Scheduler
from services.scheduler.telemetry import open_telemetry, route_of
from services.scheduler.timing import parse_traceparent
from services.scheduler.tracing import WATCHED_PATHS
from tests.services.engines import served
from tests.waiting import LONG_S

pytest.importorskip("opentelemetry.sdk")

BODY = {"inputs": [{"name": "input", "shape": [1, 1, 1, 1], "datatype": "FP32", "data": [1]}]}
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Keeps what is sent to it, decoded."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.url = ""

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
            return
        assert path == "/v1/metrics"
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            self.metrics |= {each.name: each for scope in resource.scope_metrics for each in scope.metrics}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            collector.take(self.path, body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with pytest.MonkeyPatch.context() as patched:
            # What is sent last must come, however long this process waits for its turn.
            patched.setattr("services.scheduler.telemetry._LAST_SEND_S", LONG_S)
            yield collector
    finally:
        server.shutdown()
        server.server_close()


def ask(config: ServeConfig, headers: dict[str, str] | None = None) -> list[httpx.Response]:
    """One request that is answered, one that is refused and one of a prober, then a drained scheduler."""

    async def main(address: str) -> list[httpx.Response]:
        model = Model("m", address=address)
        scheduler = Scheduler(config, {"m": model}, {})
        await scheduler.start()
        await model.wait_until_ready(LONG_S)
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            replies = [
                await client.post("/v2/models/m/infer", json=BODY, headers=headers),
                await client.post("/v2/models/other/infer", json=BODY),
                await client.get("/v2/health/ready"),
            ]
        await scheduler.drain()
        return replies

    with served() as address:
        return asyncio.run(main(address))


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_a_request_is_a_span_with_its_call_below_it() -> None:
    with collecting() as collector:
        replies = ask(ServeConfig(otlp_endpoint=collector.url), {"traceparent": CLIENT})
    assert [reply.status_code for reply in replies] == [200, 404, 200]
    by_name = {span.name: span for span in collector.spans}
    root, call = by_name["POST /v2/models/{name}/infer"], by_name["infer m"]
    refused = by_name["POST"]
    assert len(collector.spans) == 3  # none of the prober
    assert root.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert (call.trace_id, call.parent_span_id) == (root.trace_id, root.span_id)
    began, ended = root.start_time_unix_nano, root.end_time_unix_nano
    assert began < call.start_time_unix_nano <= call.end_time_unix_nano
    assert call.end_time_unix_nano <= ended
    assert attributes(root)["http.response.status_code"] == 200
    about = attributes(call)
    assert (about["gati.model"], about["gati.version"], about["gati.exits"]) == ("m", "first", ["base"])
    assert attributes(refused)["http.response.status_code"] == 404
    assert not refused.parent_span_id


def test_metrics_count_every_request_and_answer() -> None:
    with collecting() as collector:
        ask(ServeConfig(otlp_endpoint=collector.url, trace_sampling=0.0))
    assert not collector.spans
    durations = collector.metrics["http.server.request.duration"].histogram.data_points
    assert sorted((attributes(point)["http.response.status_code"], point.count) for point in durations) == [
        (200, 1), (404, 1),
    ]  # fmt: skip
    (answers,) = collector.metrics["gati.answers"].sum.data_points
    assert answers.as_int == 1
    assert attributes(answers) == {"gati.model": "m", "gati.version": "first", "gati.exit": "base"}


def test_clients_without_a_key_make_no_routes() -> None:
    async def main(config: ServeConfig) -> list[int]:
        scheduler = Scheduler(config, {}, {})
        transport = httpx.ASGITransport(Front(create_app(scheduler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            paths = [*(f"/{number}{'x' * 5000}" for number in range(9)), "/v2/models/a/infer", "/v2/models/b"]
            replies = [await client.get(path) for path in paths]
        await scheduler.drain()
        return [reply.status_code for reply in replies]

    with collecting() as collector:
        config = ServeConfig(otlp_endpoint=collector.url, api_key="k", trace_sampling=0.0)
        assert set(asyncio.run(main(config))) == {401}
    durations = collector.metrics["http.server.request.duration"].histogram.data_points
    assert sorted((attributes(point).get("http.route", ""), point.count) for point in durations) == [
        ("", 9), ("/v2/models/{name}", 1), ("/v2/models/{name}/infer", 1),
    ]  # fmt: skip


def test_every_endpoint_has_its_route() -> None:
    app = create_app(Scheduler(ServeConfig(), {"m": Model("m", address="localhost:1")}, {}))
    eviction = create_eviction_app(app.state.scheduler, EvictionState(Continuations(None), Path()))
    found = {*app.openapi()["paths"], *eviction.openapi()["paths"], "/dashboard/m/", "/dashboard/m/events"}
    for path in found:
        if not path.startswith(WATCHED_PATHS):
            template = re.sub(r"\{(model|pipeline)\}|(?<=/dashboard/)m", "{name}", path)
            assert route_of(re.sub(r"[{}]", "", path)) == template


def test_a_request_without_a_parent_has_the_trace_id_that_its_log_line_names(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "gati.rest")
    with collecting() as collector:
        ask(ServeConfig(otlp_endpoint=collector.url))
    (line,) = (record for record in caplog.records if record.message == "request")
    (root,) = (span for span in collector.spans if span.name.startswith("POST /v2"))
    assert root.trace_id.hex() == vars(line)["trace_id"]
    assert not root.parent_span_id


@pytest.mark.slow
def test_a_collector_that_is_away_costs_nobody_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.telemetry._LAST_SEND_S", 0.2)
    before = set(threading.enumerate())
    replies = ask(ServeConfig(otlp_endpoint="http://127.0.0.1:9"))
    assert [reply.status_code for reply in replies] == [200, 404, 200]
    left = {each.name for each in set(threading.enumerate()) - before}
    assert not [name for name in left if "Otel" in name or "telemetry" in name], "nothing is tried on"


def test_without_an_endpoint_nothing_is_made() -> None:
    assert open_telemetry(ServeConfig()) is None


def test_what_is_no_url_is_refused(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('otlp_endpoint = "collector:4318"\n[models.m]\nlibrary = "l"\n')
    with pytest.raises(ConfigError, match=r"setting 'otlp_endpoint'"):
        read_config(tmp_path / "serve.toml", environment={})


@pytest.mark.parametrize(
    "given",
    [None, "", "00-xyz", f"{CLIENT}-more", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01"],
)
def test_what_is_no_traceparent_is_nobodys_child(given: str | None) -> None:
    assert parse_traceparent(given) is None
