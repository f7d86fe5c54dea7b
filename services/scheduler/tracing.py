"""The trace of one request, recorded while it is served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

_KEY = "gati.trace"
WATCHED_PATHS = ("/v2/health/", "/metrics")  # asked every few seconds by those who watch
LONGEST_PATH = 200  # characters of one that are told


@dataclass(frozen=True)
class TracedCall:
    """One call of an inference service; times are milliseconds after the request arrived."""

    name: str
    started_ms: float
    ended_ms: float
    attributes: Mapping[str, Any]


@dataclass
class RequestTrace:
    """Filled in by who answers. Empty for what was refused before, and made only where somebody follows."""

    trace_id: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    calls: list[TracedCall] = field(default_factory=list)

    def answered(self, trace_id: str, attributes: Mapping[str, Any], calls: Iterable[TracedCall]) -> None:
        """Note the answer, and the calls that gave it."""
        self.trace_id = trace_id
        self.attributes.update(attributes)
        self.calls.extend(calls)


def follow(scope: Scope) -> None:
    """Have notes made of the request with that scope."""
    scope[_KEY] = RequestTrace()


def trace_of(scope: Scope) -> RequestTrace | None:
    """The notes of the request with that scope; None where none are taken."""
    found: RequestTrace | None = scope.get(_KEY)
    return found


def called(
    model: str, version: str, exits: Sequence[str], between_ms: tuple[float, float], service_ms: float
) -> TracedCall:
    """A call of the service of `model`, which had the inputs for `service_ms`; `exits` has one for each."""
    attributes = {
        "gati.model": model,
        "gati.version": version,
        "gati.exits": tuple(exits),
        "gati.service_ms": round(service_ms, 3),
    }
    return TracedCall(f"infer {model}", *between_ms, attributes)
