"""The metrics of all processes on one page, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gati.pipelines import OptionReport
from gati.types import BASE

_SERVICE = ("model", "replica")
REQUEST_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)


class Metrics:
    """The metrics of the scheduler and of the inference services.

    Times and missed SLOs of the given models and pipelines begin at 0: Prometheus does not see a counter's
    first increment if that is when it appears. Refused requests appear with the first one of their reason.
    """

    def __init__(self, models: Iterable[str] = (), pipelines: Iterable[str] = ()) -> None:
        self._registry = CollectorRegistry()
        self._services = _Services()
        self._registry.register(self._services)
        self._planning = _Planning()
        self._registry.register(self._planning)
        self.request_seconds = Histogram(
            "gati_request_seconds",
            "Requests for a model, from arrival to answer",
            ["model"],
            buckets=REQUEST_BOUNDS_S,
            registry=self._registry,
        )
        self.request_slo_missed = Counter(
            "gati_request_slo_missed",
            "Answered requests for a model that took longer than their latency SLO",
            ["model"],
            registry=self._registry,
        )
        self.pipeline_seconds = Histogram(
            "gati_pipeline_seconds",
            "Queries to a pipeline, from arrival to answer",
            ["pipeline"],
            buckets=REQUEST_BOUNDS_S,
            registry=self._registry,
        )
        self.slo_missed = Counter(
            "gati_slo_missed",
            "Answered queries that took longer than their latency SLO",
            ["pipeline"],
            registry=self._registry,
        )
        self._rejected = Counter(
            "gati_rejected",
            "Requests refused, by reason; those for an unknown name have neither model nor pipeline",
            ["reason", "model", "pipeline"],
            registry=self._registry,
        )
        for name in models:
            self.request_seconds.labels(name)
            self.request_slo_missed.labels(name)
        for name in pipelines:
            self.pipeline_seconds.labels(name)
            self.slo_missed.labels(name)

    def rejected(self, reason: str, name: str = "") -> None:
        """Count a refused request for `models/NAME` or `pipelines/NAME`; else it is about neither."""
        kind, _, own = name.partition("/")
        of_pipeline = kind == "pipelines"
        self._rejected.labels(reason, "" if of_pipeline else own, own if of_pipeline else "").inc()

    def render(
        self,
        statistics: Mapping[str, Mapping[int, Any]],
        models: Mapping[str, Any],
        pipelines: Mapping[str, Any],
    ) -> bytes:
        """The page. `statistics` has the services that answer, by model and replica.

        `models` and `pipelines` have all of them. Metrics of a service have a label `replica` if the model
        is `numbered`: rates are then computed per replica, so that a restart of one, which lowers the sum,
        does not look like a reset of all counters.
        """
        self._planning.pipelines = pipelines
        self._services.statistics = statistics
        self._services.models = models
        return generate_latest(self._registry)


class _Declared(NamedTuple):
    """A family of metrics. `value` returns the sample of one thing, None if it has none."""

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    value: Callable[[Any], float | None]


_gauge, _counter = partial(_Declared, GaugeMetricFamily), partial(_Declared, CounterMetricFamily)

_OF_EXIT = (  # of `ExitStatistics`; the network itself is no cache
    _counter(
        "gati_cache_queries", "Lookups of learned caches", lambda it: None if it.exit == BASE else it.queries
    ),
    _counter("gati_cache_hits", "Lookups that hit", lambda it: None if it.exit == BASE else it.hits),
    _counter("gati_exits", "Inputs by the exit that answered them", lambda it: it.hits),
)
_OF_AUDITS = (  # of the numbers of audits and of trials that agreed, or that did not
    _counter("gati_audits", "Answers compared with the base model's", lambda it: it[0]),
    _counter(
        "gati_trials",
        "Lookups of caches that do not answer yet, compared with the base model's answer",
        lambda it: it[1] or 0,
    ),
)
_OF_STATE = (
    _gauge(
        "gati_version_state",
        "1 for the state of a version: serving, probation, stopped or unguarded",
        lambda it: 1.0,
    ),
)
_OF_VERSION = (  # of `VersionInfo`
    _gauge(
        "gati_version_pending",
        "1 while a version waits to be proven before it takes over",
        lambda it: bool(it.pending),
    ),
    _gauge("gati_proof_audits", "Audits of the proof in progress", lambda it: it.proof and it.proof.audits),
    _gauge(
        "gati_proof_audits_needed",
        "Approximate number of audits that completes the proof if none is a loss",
        lambda it: it.proof and it.proof.needed,
    ),
    _gauge("gati_version_level", "Number of settings that may answer", lambda it: it.level or 0),
    _gauge("gati_version_settings", "Number of settings of the version", lambda it: it.settings or 0),
    _gauge(
        "gati_version_resting",
        "1 while lookups are skipped because they cost more than they save",
        lambda it: bool(it.resting),
    ),
)
_OF_SERVICE = (  # of `Statistics`
    _counter(
        "gati_left_out", "Audits, trials and samples skipped for lack of time", lambda it: it.left_out or 0
    ),
    _counter("gati_recalled", "Inputs answered from memory", lambda it: it.memory and it.memory.answers),
    _counter(
        "gati_places_forgotten",
        "Places that memory dropped to make room for others",
        lambda it: it.memory and it.memory.forgotten,
    ),
    _gauge("gati_places", "Places in memory", lambda it: it.memory and it.memory.places),
    _gauge(
        "gati_memory_level",
        "Number of settings of memory that may answer",
        lambda it: it.memory and it.memory.level,
    ),
    _gauge("gati_queue_inputs", "Inputs waiting in the queue", lambda it: it.waiting),
    _gauge("gati_resident_bytes", "Resident memory of the process", lambda it: it.resident_bytes),
    _gauge(
        "gati_caches_stopped",
        "1 while the guard has stopped the caches from answering",
        lambda it: it.stopped,
    ),
)
_OF_MODEL = (
    _gauge("gati_ready", "1 when the model answers", lambda it: it.ready),
    _gauge(
        "gati_replicas",
        "Replicas of the model, running or starting",
        lambda it: sum(each.wanted for each in it.replicas),
    ),
    _gauge("gati_replicas_ready", "Replicas that answer", lambda it: sum(each.ready for each in it.replicas)),
    _gauge(
        "gati_asleep", "1 while the model is asleep: the next request starts it", lambda it: it.sleep.asleep
    ),
    _gauge("gati_start_seconds", "Duration of the last start of the model", lambda it: it.sleep.start_s),
    _counter(
        "gati_asked_again",
        "Requests sent to a second replica because the first one died",
        lambda it: it.dispatcher.asked_again,
    ),
)
_OF_REPLICA = (
    _counter("gati_restarts", "Starts after a crash", lambda it: it.restarts),
    _gauge(
        "gati_outstanding_inputs",
        "Inputs sent to a service and not yet answered",
        lambda it: it.load.outstanding,
    ),
    _gauge(
        "gati_input_seconds",
        "Learned time that each outstanding input adds to an answer",
        lambda it: it.load.seconds_an_input or 0.0,
    ),
)
_OF_ACTIVE = (_gauge("gati_version_info", "The version that answers", lambda it: 1.0),)
_OF_PART = (  # of milliseconds
    _gauge(
        "gati_option_seconds",
        "Mean time of a request to an option: as planned, and recently in engine, queue and transfer",
        lambda it: None if it is None else it / 1e3,
    ),
)
_OF_OPTION = (  # of `OptionReport`
    _gauge("gati_option_accuracy", "Accuracy used for planning", lambda it: it.accuracy),
    _gauge(
        "gati_option_prior_share",
        "Weight of the offline measurement in the figures",
        lambda it: it.prior_share,
    ),
    _gauge("gati_option_hit_rate", "Recent share of requests that exit early", lambda it: it.hit_rate),
    _gauge(
        "gati_option_agreement",
        "Expected agreement with the base model; gati_option_promised_agreement is the promised one",
        lambda it: it.agreement and it.agreement.expected,
    ),
    _gauge(
        "gati_option_promised_agreement",
        "Agreement that the certificate promises",
        lambda it: it.agreement and it.agreement.promised,
    ),
    _counter("gati_option_requests", "Requests that an option answered", lambda it: it.chosen),
    _counter(
        "gati_option_explored",
        "Requests sent to an option to update its figures after a long pause",
        lambda it: it.explored,
    ),
)
_OF_PIPELINE = (
    _counter("gati_replans", "New plans made", lambda it: it.planner.replans),
    _counter(
        "gati_replan_seconds",
        "Time spent on deciding whether to plan again, and on planning",
        lambda it: it.replanning.took_s,
    ),
)


def _families(
    declared: Iterable[_Declared], labels: Sequence[str], things: Iterable[tuple[Sequence[str], Any]]
) -> Iterator[Metric]:
    """The declared families of some things, each with the values of its labels."""
    known = list(things)
    for each in declared:
        family = each.kind(each.name, each.text, labels=labels)
        for where, thing in known:
            value = each.value(thing)
            if value is not None:
                family.add_metric(where, value)
        yield family


class _Services(Collector):
    """The metrics of the inference services, from their latest statistics."""

    def __init__(self) -> None:
        self.statistics: Mapping[str, Mapping[int, Any]] = {}
        self.models: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        """Every family, in the order of the page."""
        found = [
            ([name, self._label(name, number)], each)
            for name, replicas in self.statistics.items()
            for number, each in replicas.items()
        ]
        exits = [([*where, row.version, row.exit], row) for where, each in found for row in each.exits]
        agreed = [([*where, "true"], (each.audits_agreed, each.trials_agreed)) for where, each in found]
        differ = [
            ([*where, "false"], (each.audits_disagreed, each.trials_disagreed)) for where, each in found
        ]
        versions = [
            ([*where, version.version], version) for where, each in found for version in each.versions or ()
        ]
        states = [([*where, version.state or "serving"], version) for where, version in versions]
        replicas = [
            ([name, self._label(name, each.number)], each)
            for name, model in self.models.items()
            for each in model.replicas
        ]
        active = [([*where, each.active.version], each) for where, each in replicas if each.ready]
        models = [([name], model) for name, model in self.models.items()]
        families = chain(
            _seconds(found),
            _families(_OF_EXIT, [*_SERVICE, "version", "block"], exits),
            _families(_OF_AUDITS, [*_SERVICE, "agreed"], agreed + differ),
            _families(_OF_STATE, [*_SERVICE, "version", "state"], states),
            _families(_OF_VERSION, [*_SERVICE, "version"], versions),
            _families(_OF_SERVICE, _SERVICE, found),
            _families(_OF_MODEL, ["model"], models),
            _families(_OF_REPLICA, _SERVICE, replicas),
            _families(_OF_ACTIVE, [*_SERVICE, "version"], active),
        )
        return map(_without_empty, families)

    def _label(self, model: str, number: int) -> str:
        return str(number) if self.models[model].numbered else ""


def _seconds(found: Iterable[tuple[Sequence[str], Any]]) -> Iterator[Metric]:
    """The histograms of services, from their statistics."""
    queue = HistogramMetricFamily("gati_queue_seconds", "Time of inputs in the queue", labels=_SERVICE)
    service = HistogramMetricFamily(
        "gati_service_seconds", "Time of inputs from leaving the queue to their answer", labels=_SERVICE
    )
    for where, each in found:
        queue.add_metric(where, _buckets(each.queue_seconds), each.queue_seconds.sum_s)
        service.add_metric(where, _buckets(each.service_seconds), each.service_seconds.sum_s)
    yield queue
    yield service


def _without_empty(family: Metric) -> Metric:
    """Drop empty labels, which Prometheus treats as absent: models with one replica have no replica label."""
    family.samples = [
        sample._replace(labels={name: value for name, value in sample.labels.items() if value})
        for sample in family.samples
    ]
    return family


class _Planning(Collector):
    """The metrics of pipelines whose planners adapt to the traffic."""

    def __init__(self) -> None:
        self.pipelines: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        """Every family, in the order of the page."""
        live = {name: each for name, each in self.pipelines.items() if each.replanning is not None}
        reports = [
            ([name, report.stage, report.option], report)
            for name, each in live.items()
            for report in each.planner.report()
        ]
        parts = [
            ([*where, part], part_ms) for where, report in reports for part, part_ms in _parts(report).items()
        ]
        option = ["pipeline", "stage", "option"]
        return chain(
            _families(_OF_PART, [*option, "part"], parts),
            _families(_OF_OPTION, option, reports),
            _families(_OF_PIPELINE, ["pipeline"], [([name], each) for name, each in live.items()]),
        )


def _parts(report: OptionReport) -> dict[str, float | None]:
    return {
        "planned": report.latency_ms,
        "engine": report.engine_ms,
        "queue": report.queue_ms,
        "way": report.way_ms,
    }


def _buckets(histogram: Any) -> list[tuple[str, float]]:
    """Cumulative counts for the upper bounds, the last of which is infinite, as Prometheus requires."""
    total, found = 0, []
    for bound, count in zip((*histogram.upper_bounds_s, None), histogram.counts, strict=True):
        total += count
        found.append(("+Inf" if bound is None else str(bound), float(total)))
    return found
