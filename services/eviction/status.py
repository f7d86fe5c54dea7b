"""The fitter's status: a file that it writes every few seconds, and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gati.evict.learn.folder import status_of

_COUNTERS = {
    "requested": ("gati_evict_requested", "Blocks of requests to engines"),
    "hit": ("gati_evict_hit", "Blocks of requests that were cached"),
    "evicted": ("gati_evict_evicted", "Blocks that engines evicted"),
    "caught": ("gati_evict_caught", "Evictions by prediction that turned out wrong"),
    "records": ("gati_evict_records", "Requests read from access logs"),
    "damaged": ("gati_evict_damaged", "Lines of access logs that were cut or changed"),
    "lost": ("gati_evict_lost_segments", "Segments of access logs that were deleted before they were read"),
    "fits": ("gati_evict_fits", "Predictors that were fitted"),
    "adopted": ("gati_evict_adopted", "Predictors that were published"),
}
_GAUGES = {
    "guard_excess": ("gati_evict_guard_excess", "Blocks missed in excess of LRU, over all engines"),
    "version": ("gati_evict_version", "The active version"),
}


def read_status(folder: Path) -> dict[str, Any]:
    """Return the state of the fitter; empty if it has not started, or if the file is not readable."""
    try:
        found = json.loads(status_of(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def metrics_page(status: Mapping[str, Any]) -> bytes:
    """Return the state in the Prometheus format."""
    registry = CollectorRegistry()
    registry.register(_Told(status))
    return generate_latest(registry)


class _Told:
    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> list[Metric]:
        """Return all metric families that have values."""
        found: list[Metric] = []
        for key, (name, text) in _COUNTERS.items():
            if isinstance(value := self._status.get(key), (int, float)):
                found.append(CounterMetricFamily(name, text, value=value))
        for key, (name, text) in _GAUGES.items():
            if isinstance(value := self._status.get(key), (int, float)):
                found.append(GaugeMetricFamily(name, text, value=value))
        return found
