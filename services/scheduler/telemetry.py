"""Traces and metrics for OpenTelemetry, sent with OTLP over HTTP. Off unless `otlp_endpoint` is set.

A request is one span of kind server, and each call of an inference service is a child span. Spans are created
when the request has ended, from times that are measured anyway, and sent in the background: if a collector is
slow or unreachable, spans may be lost, but requests are not affected.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from gati.errors import ConfigError
from gati.version import __version__
from services.config import ServeConfig
from services.scheduler.metrics import REQUEST_BOUNDS_S
from services.scheduler.timing import parse_traceparent
from services.scheduler.tracing import LONGEST_PATH, WATCHED_PATHS, RequestTrace

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

_log = logging.getLogger("gati.telemetry")

_NAME = re.compile(r"/(v1/models|v1/pipelines|v2/models|v2/repository/models|dashboard)/[^/]+")
_VERSION = re.compile(r"/versions/[^/]+")
# All routes that are reported. Clients without a key choose paths, too, and each route is kept for good.
_ROUTES = frozenset(
    (
        "/dashboard",
        "/dashboard/{name}/",
        "/dashboard/{name}/events",
        "/dashboard/{name}/frame.jpg",
        "/docs",
        "/openapi.json",
        "/v1/adaptation",
        "/v1/continue",
        "/v1/eviction",
        "/v1/models/{name}/replicas",
        "/v1/pipelines",
        "/v1/pipelines/{name}",
        "/v1/pipelines/{name}/query",
        "/v2",
        "/v2/models/stats",
        "/v2/models/{name}",
        "/v2/models/{name}/infer",
        "/v2/models/{name}/ready",
        "/v2/models/{name}/stats",
        "/v2/models/{name}/versions/{version}",
        "/v2/models/{name}/versions/{version}/infer",
        "/v2/models/{name}/versions/{version}/ready",
        "/v2/models/{name}/versions/{version}/stats",
        "/v2/repository/index",
        "/v2/repository/models/{name}/load",
        "/v2/repository/models/{name}/unload",
    )
)
_SEND_EVERY_S = 15.0
_LAST_SEND_S = 3.0
_GIVE_UP_S = 1.0  # to end a request to the collector that is in progress
_SERVER_ERROR = 500


def open_telemetry(config: ServeConfig) -> OpenTelemetry | None:
    """Return the telemetry, None if it is not configured. Raises `ConfigError` without the extra."""
    if config.otlp_endpoint is None:
        return None
    try:
        return OpenTelemetry(config.otlp_endpoint, config.trace_sampling)
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs OpenTelemetry ({error}); pip install 'gati[telemetry]'"
        ) from error


class OpenTelemetry:
    """Spans and metrics to the collector at `endpoint`, such as http://localhost:4318.

    `sampling` is the share of requests with spans, unless the client's `traceparent` decides. Metrics count
    all requests except those of monitoring (`WATCHED_PATHS`). Headers for the collector, certificates and
    attributes of the service come from the environment variables of OpenTelemetry
    (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES` ...).
    """

    def __init__(self, endpoint: str, sampling: float = 1.0) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        class Ids(RandomIdGenerator):
            """Gives a request without a parent span the trace id that its answer and log lines contain."""

            named = 0

            def generate_trace_id(self) -> int:
                return self.named or super().generate_trace_id()

        base = endpoint.rstrip("/")
        resource = Resource.create({"service.name": "gati", "service.version": __version__})
        self._ids = Ids()
        self._spans = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sampling),
            resource=resource,
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        spans = OTLPSpanExporter(f"{base}/v1/traces")
        metrics = OTLPMetricExporter(f"{base}/v1/metrics")
        self._exporters = (spans, metrics)
        self._spans.add_span_processor(BatchSpanProcessor(spans))
        self._reader = PeriodicExportingMetricReader(metrics, export_interval_millis=1e3 * _SEND_EVERY_S)
        self._meters = MeterProvider([self._reader], resource, shutdown_on_exit=False)
        meter = self._meters.get_meter("gati", __version__)
        self._tracer: Tracer = self._spans.get_tracer("gati", __version__)
        self._duration = meter.create_histogram(
            "http.server.request.duration",
            unit="s",
            description="HTTP requests, from head to end of reply",
            explicit_bucket_boundaries_advisory=REQUEST_BOUNDS_S,
        )
        self._answers = meter.create_counter(
            "gati.answers", unit="{input}", description="Answered inputs by where their answer came from"
        )

    def ended(self, scope: Scope, trace: RequestTrace, status: int, seconds: float) -> None:
        """Count a request that has just ended, and create its spans; ignores requests of monitoring."""
        path: str = scope["path"]
        if path.startswith(WATCHED_PATHS):
            return
        route = route_of(path) if status != 404 else ""
        about = {
            "http.request.method": scope["method"],
            "http.response.status_code": status,
            **({"http.route": route} if route else {}),
        }
        self._duration.record(seconds, about)
        for call in trace.calls:
            where = {name: call.attributes[name] for name in ("gati.model", "gati.version")}
            for left in call.attributes["gati.exits"]:
                self._answers.add(1, {**where, "gati.exit": left})
        self._trace(scope, trace, {**about, "url.path": path[:LONGEST_PATH]}, seconds)

    def _trace(self, scope: Scope, trace: RequestTrace, about: dict[str, Any], seconds: float) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        now_ns = time.time_ns()
        began_ns = now_ns - int(1e9 * seconds)
        status, route = about["http.response.status_code"], about.get("http.route", "")
        context, self._ids.named = self._parent(scope), int(trace.trace_id or "0", 16)
        span = self._tracer.start_span(
            f"{scope['method']} {route}".strip(),
            context,
            SpanKind.SERVER,
            {**about, **trace.attributes},
            start_time=began_ns,
        )
        if span.is_recording():
            within = set_span_in_context(span)
            for call in trace.calls:  # its times count from the arrival, slightly before `began_ns`
                called_ns, answered_ns = (
                    min(now_ns, began_ns + int(1e6 * ms)) for ms in (call.started_ms, call.ended_ms)
                )
                below = self._tracer.start_span(
                    call.name, within, SpanKind.CLIENT, dict(call.attributes), start_time=called_ns
                )
                below.end(answered_ns)
            if status >= _SERVER_ERROR:
                span.set_status(StatusCode.ERROR)
        span.end(now_ns)

    def _parent(self, scope: Scope) -> Context:
        """Return the context of the client's span from `traceparent`; an empty one without a valid one."""
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        given = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
        parent = parse_traceparent(given.decode("latin-1"))
        if parent is None:
            return Context()
        there = SpanContext(
            int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True,
            trace_flags=TraceFlags(int(parent.flags, 16)),
        )  # fmt: skip
        return set_span_in_context(NonRecordingSpan(there), Context())

    def close(self) -> None:
        """Send the remaining data, in a thread: retries take seconds if the collector is unreachable."""
        sending = threading.Thread(target=self._close, name="gati-telemetry", daemon=True)
        sending.start()
        sending.join(_LAST_SEND_S)
        if sending.is_alive():
            for exporter in self._exporters:
                exporter.shutdown()  # ends its retries
            sending.join(_GIVE_UP_S)
            _log.warning("the last spans and metrics were not sent", extra={"waited_s": _LAST_SEND_S})

    def _close(self) -> None:
        self._spans.shutdown()
        self._meters.shutdown()


def route_of(path: str) -> str:
    """Return the template of the route of a path, such as `/v2/models/{name}/infer`; empty if unknown."""
    if path in _ROUTES:
        return path
    route = _VERSION.sub("/versions/{version}", _NAME.sub(r"/\1/{name}", path))
    return route if route in _ROUTES else ""
