"""When a request arrived, how long it may take, and the trace it belongs to."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass

__all__ = ["Timing", "trace_id_of"]

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True)
class Timing:
    """What a request wishes. `arrived_s` is of `time.monotonic`; `latency_slo_ms` None is no wish.

    After `timeout_ms` nobody waits for its answer any more.
    """

    arrived_s: float
    latency_slo_ms: float | None
    timeout_ms: float
    priority: int
    trace_id: str

    def elapsed_ms(self) -> float:
        """Since it arrived."""
        return 1e3 * (time.monotonic() - self.arrived_s)


def trace_id_of(traceparent: str | None) -> str:
    """The trace id of a W3C traceparent, or a new one."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    return match[1] if match else secrets.token_hex(16)
