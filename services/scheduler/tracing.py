"""The trace of one request, recorded while it is served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

_KEY = "gati.trace"
WATCHED_PATHS = ("/v2/health/", "/metrics")  # requested every few seconds by monitoring
LONGEST_PATH = 200  # characters of a path in traces and log lines


@dataclass(frozen=True)
class TracedCall:
    """One call of an inference service; times are milliseconds after the request arrived."""

    name: str
    started_ms: float
    ended_ms: float
    attributes: Mapping[str, Any]


@dataclass
class RequestTrace:
    """The trace of a request, filled in by its handler; empty if it was refused earlier.

    Only requests for which `follow` was called have one.
    """

    trace_id: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    calls: list[TracedCall] = field(default_factory=list)

    def answered(self, trace_id: str, attributes: Mapping[str, Any], calls: Iterable[TracedCall]) -> None:
        """Record the answer, and the calls that produced it."""
        self.trace_id = trace_id
        self.attributes.update(attributes)
        self.calls.extend(calls)


def follow(scope: Scope) -> None:
    """Start a trace of the request with that scope."""
    scope[_KEY] = RequestTrace()


def trace_of(scope: Scope) -> RequestTrace | None:
    """Return the trace of the request with that scope; None if it is not traced."""
    found: RequestTrace | None = scope.get(_KEY)
    return found


def called(
    model: str, version: str, exits: Sequence[str], between_ms: tuple[float, float], service_ms: float
) -> TracedCall:
    """Return a call of the service of `model`, from its start and end in `between_ms`.

    The service itself took `service_ms`; `exits` has one exit per input.
    """
    attributes = {
        "gati.model": model,
        "gati.version": version,
        "gati.exits": tuple(exits),
        "gati.service_ms": round(service_ms, 3),
    }
    return TracedCall(f"infer {model}", *between_ms, attributes)
