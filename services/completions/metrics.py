"""Metrics of the engine in the Prometheus format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gati.evict.engine.engine import PrefixEngine
from gati.evict.engine.generation import Generation

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_COUNTS = {
    "requests": "Requests that were admitted",
    "prompt_tokens": "Tokens of prompts, cached or not",
    "computed_tokens": "Tokens that went through the network",
    "generated_tokens": "Tokens that were generated",
    "cancelled": "Requests that were cancelled: the client disconnected, or a stop was found",
    "failed": "Requests that could not be completed",
    "restarted": "Requests that lost their pages when the budget shrank, and were restarted",
    "steps": "Batches that were computed",
}


class CompletionMetrics:
    """The metrics page of an engine."""

    def __init__(self, engine: PrefixEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Figures(engine))
        self._first_token = Histogram(
            "gati_engine_time_to_first_token_seconds",
            "From a request's arrival to its first token, by whether any page of its prompt was cached",
            ["prefix"],
            buckets=_BOUNDS_S,
            registry=self._registry,
        )
        for prefix in ("hit", "miss"):
            self._first_token.labels(prefix)
        self.refused = Counter(
            "gati_engine_refused",
            "Requests that were refused, by reason",
            ["reason"],
            registry=self._registry,
        )

    def first_token(self, generation: Generation) -> None:
        """Record the first token of a generation."""
        if generation.time_to_first_token_s is not None:
            prefix = "hit" if generation.hit_tokens else "miss"
            self._first_token.labels(prefix).observe(generation.time_to_first_token_s)

    def render(self) -> bytes:
        """Return the page."""
        return generate_latest(self._registry)


class _Figures(Collector):
    def __init__(self, engine: PrefixEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families, in the order of the page."""
        found = self._engine.figures()
        for name, text in _COUNTS.items():
            yield CounterMetricFamily(f"gati_engine_{name}", text, value=found[name])
        requests = GaugeMetricFamily("gati_engine_under_way", "Requests now, by state", labels=["state"])
        for state in ("running", "waiting"):
            requests.add_metric([state], found[state])
        pages = GaugeMetricFamily(
            "gati_engine_pages",
            "Pages of keys and values: in use by requests, kept for later ones, and free",
            labels=["state"],
        )
        held, used, cached = (found["pages"][name] for name in ("held", "used", "cached"))
        for state, count in (("used", used), ("cached", cached), ("free", held - used - cached)):
            pages.add_metric([state], count)
        yield from (requests, pages)
        for name, text in (
            ("requested", "Whole pages of prompts"),
            ("hit", "Leading pages of prompts that were cached"),
            ("evicted", "Pages of prefixes that were evicted"),
        ):
            yield CounterMetricFamily(f"gati_evict_{name}", text, value=found[f"pages_{name}"])
        policy = found["policy"]
        if "caught" in policy:
            caught = "Wrong predictions: the page was requested again after its eviction"
            yield CounterMetricFamily("gati_evict_caught", caught, value=policy["caught"])
        if "guard" in policy:
            excess = "Pages missed in excess of LRU"
            yield GaugeMetricFamily("gati_evict_guard_excess", excess, value=policy["guard"]["excess"])
