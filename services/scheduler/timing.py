"""The arrival, the time limits and the trace id of a request."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceParent(NamedTuple):
    """The fields of a W3C traceparent, which describe the caller's span, as hexadecimal digits."""

    trace_id: str
    span_id: str
    flags: str


class Timing(NamedTuple):
    """Time limits of a request; `arrived_s` is by `time.monotonic`.

    `latency_slo_ms` is None without an SLO. After `timeout_ms` the client has given up.
    """

    arrived_s: float
    latency_slo_ms: float | None
    timeout_ms: float
    priority: int
    trace_id: str

    def elapsed_ms(self) -> float:
        """The time since it arrived."""
        return 1e3 * (time.monotonic() - self.arrived_s)


def in_services_ms(stages: Iterable[Mapping[str, Any]]) -> float:
    """Return how many ms at least one service worked on a query, from the times of its stages.

    Each stage has its start (`started_ms`), its duration (`latency_ms`), and the part of it inside the
    service (`service_ms`). Concurrent stages count once, so the result is never more than the duration of the
    query.
    """
    spans = []
    for stage in stages:
        service_ms = min(stage["service_ms"], stage["latency_ms"])
        way_ms = (stage["latency_ms"] - service_ms) / 2  # assumed to be the same in both directions
        began_ms = stage["started_ms"] + way_ms
        spans.append((began_ms, began_ms + service_ms))
    total_ms = covered_ms = 0.0
    for began_ms, ended_ms in sorted(spans):
        total_ms += max(0.0, ended_ms - max(began_ms, covered_ms))
        covered_ms = max(covered_ms, ended_ms)
    return total_ms


def trace_id_of(traceparent: str | None) -> str:
    """Return the trace id of a W3C traceparent, or a new one."""
    found = parse_traceparent(traceparent)
    return secrets.token_hex(16) if found is None else found.trace_id


def parse_traceparent(traceparent: str | None) -> TraceParent | None:
    """Parse a W3C traceparent; None if it is invalid or its ids are zero."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    found = None if match is None else TraceParent(*match.groups())
    return None if found is None or not (int(found.trace_id, 16) and int(found.span_id, 16)) else found
