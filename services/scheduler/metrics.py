"""The metrics of all processes on one page, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

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
    """The metrics of the scheduler and of the inference services."""

    def __init__(self) -> None:
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


class _Services(Collector):
    """The metrics of the inference services, from their latest statistics."""

    def __init__(self) -> None:
        self.statistics: Mapping[str, Mapping[int, Any]] = {}
        self.models: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        """Every family, in the order of the page."""
        families = chain(
            self._seconds(),
            self._exits(),
            self._audits(),
            self._standings(),
            self._levels(),
            self._memories(),
            self._gauges(),
            self._models(),
            self._replicas(),
        )
        return map(_without_empty, families)

    def _found(self) -> Iterator[tuple[str, str, Any]]:
        """Model, replica and statistics of every service that answers."""
        for name, replicas in self.statistics.items():
            for number, found in replicas.items():
                yield name, self._label(name, number), found

    def _label(self, model: str, number: int) -> str:
        return str(number) if self.models[model].numbered else ""

    def _seconds(self) -> Iterator[Metric]:
        queue = HistogramMetricFamily("gati_queue_seconds", "Time of inputs in the queue", labels=_SERVICE)
        service = HistogramMetricFamily(
            "gati_service_seconds", "Time of inputs from leaving the queue to their answer", labels=_SERVICE
        )
        for name, replica, found in self._found():
            queue.add_metric([name, replica], _buckets(found.queue_seconds), found.queue_seconds.sum_s)
            service.add_metric([name, replica], _buckets(found.service_seconds), found.service_seconds.sum_s)
        yield queue
        yield service

    def _exits(self) -> Iterator[Metric]:
        labels = [*_SERVICE, "version", "block"]
        queries = CounterMetricFamily("gati_cache_queries", "Lookups of learned caches", labels=labels)
        hits = CounterMetricFamily("gati_cache_hits", "Lookups that hit", labels=labels)
        exits = CounterMetricFamily("gati_exits", "Inputs by the exit that answered them", labels=labels)
        for name, replica, found in self._found():
            for row in found.exits:
                where = [name, replica, row.version, row.exit]
                exits.add_metric(where, row.hits)
                if row.exit != BASE:
                    queries.add_metric(where, row.queries)
                    hits.add_metric(where, row.hits)
        yield from (queries, hits, exits)

    def _audits(self) -> Iterator[Metric]:
        audits = CounterMetricFamily(
            "gati_audits", "Answers compared with the base model's", labels=[*_SERVICE, "agreed"]
        )
        trials = CounterMetricFamily(
            "gati_trials",
            "Lookups of caches that do not answer yet, compared with the base model's answer",
            labels=[*_SERVICE, "agreed"],
        )
        left_out = CounterMetricFamily(
            "gati_left_out", "Audits, trials and samples skipped for lack of time", labels=_SERVICE
        )
        for name, replica, found in self._found():
            audits.add_metric([name, replica, "true"], found.audits_agreed)
            audits.add_metric([name, replica, "false"], found.audits_disagreed)
            trials.add_metric([name, replica, "true"], found.trials_agreed or 0)
            trials.add_metric([name, replica, "false"], found.trials_disagreed or 0)
            left_out.add_metric([name, replica], found.left_out or 0)
        yield from (audits, trials, left_out)

    def _standings(self) -> Iterator[Metric]:
        labels = [*_SERVICE, "version"]
        state = GaugeMetricFamily(
            "gati_version_state",
            "1 for the state of a version: serving, probation, stopped or unguarded",
            labels=[*labels, "state"],
        )
        pending = GaugeMetricFamily(
            "gati_version_pending", "1 while a version waits to be proven before it takes over", labels=labels
        )
        audits = GaugeMetricFamily("gati_proof_audits", "Audits of the proof in progress", labels=labels)
        needed = GaugeMetricFamily(
            "gati_proof_audits_needed",
            "Approximate number of audits that completes the proof if none is a loss",
            labels=labels,
        )
        for name, replica, found in self._found():
            for version in found.versions or ():
                where = [name, replica, version.version]
                state.add_metric([*where, version.state or "serving"], 1.0)
                pending.add_metric(where, float(bool(version.pending)))
                if version.proof is not None:
                    audits.add_metric(where, version.proof.audits)
                    needed.add_metric(where, version.proof.needed)
        yield from (state, pending, audits, needed)

    def _levels(self) -> Iterator[Metric]:
        labels = [*_SERVICE, "version"]
        level = GaugeMetricFamily("gati_version_level", "Number of settings that may answer", labels=labels)
        settings = GaugeMetricFamily(
            "gati_version_settings", "Number of settings of the version", labels=labels
        )
        resting = GaugeMetricFamily(
            "gati_version_resting",
            "1 while lookups are skipped because they cost more than they save",
            labels=labels,
        )
        for name, replica, found in self._found():
            for version in found.versions or ():
                where = [name, replica, version.version]
                level.add_metric(where, version.level or 0)
                settings.add_metric(where, version.settings or 0)
                resting.add_metric(where, float(bool(version.resting)))
        yield from (level, settings, resting)

    def _memories(self) -> Iterator[Metric]:
        answers = CounterMetricFamily("gati_recalled", "Inputs answered from memory", labels=_SERVICE)
        forgotten = CounterMetricFamily(
            "gati_places_forgotten", "Places that memory dropped to make room for others", labels=_SERVICE
        )
        places = GaugeMetricFamily("gati_places", "Places in memory", labels=_SERVICE)
        level = GaugeMetricFamily(
            "gati_memory_level", "Number of settings of memory that may answer", labels=_SERVICE
        )
        for name, replica, found in self._found():
            if found.memory is not None:
                where = [name, replica]
                answers.add_metric(where, found.memory.answers)
                forgotten.add_metric(where, found.memory.forgotten)
                places.add_metric(where, found.memory.places)
                level.add_metric(where, found.memory.level)
        yield from (answers, forgotten, places, level)

    def _gauges(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("gati_queue_inputs", "Inputs waiting in the queue", labels=_SERVICE)
        memory = GaugeMetricFamily("gati_resident_bytes", "Resident memory of the process", labels=_SERVICE)
        stopped = GaugeMetricFamily(
            "gati_caches_stopped", "1 while the guard has stopped the caches from answering", labels=_SERVICE
        )
        for name, replica, found in self._found():
            waiting.add_metric([name, replica], found.waiting)
            memory.add_metric([name, replica], found.resident_bytes)
            stopped.add_metric([name, replica], float(found.stopped))
        yield from (waiting, memory, stopped)

    def _models(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("gati_ready", "1 when the model answers", labels=["model"])
        replicas = GaugeMetricFamily(
            "gati_replicas", "Replicas of the model, running or starting", labels=["model"]
        )
        answering = GaugeMetricFamily("gati_replicas_ready", "Replicas that answer", labels=["model"])
        asleep = GaugeMetricFamily(
            "gati_asleep", "1 while the model is asleep: the next request starts it", labels=["model"]
        )
        start = GaugeMetricFamily(
            "gati_start_seconds", "Duration of the last start of the model", labels=["model"]
        )
        again = CounterMetricFamily(
            "gati_asked_again",
            "Requests sent to a second replica because the first one died",
            labels=["model"],
        )
        for name, model in self.models.items():
            ready.add_metric([name], float(model.ready))
            replicas.add_metric([name], sum(each.wanted for each in model.replicas))
            asleep.add_metric([name], float(model.sleep.asleep))
            if model.sleep.start_s is not None:
                start.add_metric([name], model.sleep.start_s)
            answering.add_metric([name], sum(each.ready for each in model.replicas))
            again.add_metric([name], model.dispatcher.asked_again)
        yield from (ready, replicas, answering, asleep, start, again)

    def _replicas(self) -> Iterator[Metric]:
        restarts = CounterMetricFamily("gati_restarts", "Starts after a crash", labels=_SERVICE)
        version = GaugeMetricFamily(
            "gati_version_info", "The version that answers", labels=[*_SERVICE, "version"]
        )
        outstanding = GaugeMetricFamily(
            "gati_outstanding_inputs", "Inputs sent to a service and not yet answered", labels=_SERVICE
        )
        learned = GaugeMetricFamily(
            "gati_input_seconds",
            "Learned time that each outstanding input adds to an answer",
            labels=_SERVICE,
        )
        for name, model in self.models.items():
            for each in model.replicas:
                where = [name, self._label(name, each.number)]
                restarts.add_metric(where, each.restarts)
                outstanding.add_metric(where, each.load.outstanding)
                learned.add_metric(where, each.load.seconds_an_input or 0.0)
                if each.ready:
                    version.add_metric([*where, each.active.version], 1.0)
        yield from (restarts, version, outstanding, learned)


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
        option = ["pipeline", "stage", "option"]
        seconds = GaugeMetricFamily(
            "gati_option_seconds",
            "Mean time of a request to an option: as planned, and recently in engine, queue and transfer",
            labels=[*option, "part"],
        )
        gauges = {
            "accuracy": GaugeMetricFamily(
                "gati_option_accuracy", "Accuracy used for planning", labels=option
            ),
            "prior_share": GaugeMetricFamily(
                "gati_option_prior_share", "Weight of the offline measurement in the figures", labels=option
            ),
            "hit_rate": GaugeMetricFamily(
                "gati_option_hit_rate", "Recent share of requests that exit early", labels=option
            ),
        }
        agreement = GaugeMetricFamily(
            "gati_option_agreement",
            "Expected agreement with the base model; gati_option_promised_agreement is the promised one",
            labels=option,
        )
        promised = GaugeMetricFamily(
            "gati_option_promised_agreement", "Agreement that the certificate promises", labels=option
        )
        requests = CounterMetricFamily(
            "gati_option_requests", "Requests that an option answered", labels=option
        )
        explored = CounterMetricFamily(
            "gati_option_explored",
            "Requests sent to an option to update its figures after a long pause",
            labels=option,
        )
        replans = CounterMetricFamily("gati_replans", "New plans made", labels=["pipeline"])
        replan_seconds = CounterMetricFamily(
            "gati_replan_seconds",
            "Time spent on deciding whether to plan again, and on planning",
            labels=["pipeline"],
        )
        for name, served in self.pipelines.items():
            if served.replanning is None:
                continue
            replans.add_metric([name], served.planner.replans)
            replan_seconds.add_metric([name], served.replanning.took_s)
            for report in served.planner.report():
                where = [name, report.stage, report.option]
                for part, value_ms in _parts(report).items():
                    if value_ms is not None:
                        seconds.add_metric([*where, part], value_ms / 1e3)
                for field, gauge in gauges.items():
                    value = getattr(report, field)
                    if value is not None:
                        gauge.add_metric(where, value)
                if report.agreement is not None:
                    agreement.add_metric(where, report.agreement.expected)
                    if report.agreement.promised is not None:
                        promised.add_metric(where, report.agreement.promised)
                requests.add_metric(where, report.chosen)
                explored.add_metric(where, report.explored)
        yield from (seconds, *gauges.values(), agreement, promised, requests, explored, replans)
        yield replan_seconds


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
