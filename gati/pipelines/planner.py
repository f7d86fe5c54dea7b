"""The planner: which stages of a query may start, and with which option.

Nothing here reads a clock or starts a thread. Callers pass times as milliseconds since the query began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

from gati.errors import PipelineError
from gati.pipelines.figures import Observation
from gati.pipelines.pipeline import Finding, Pipeline
from gati.pipelines.policies import Plan, build_policy, longest

DEFAULT_ATTAINMENT = 0.95
_LEAST_MS = 1e-6


class Step(NamedTuple):
    """A started stage: its option, its budget, and the remaining SLO.

    `wanted` is the option that would run if sleeping ones were usable already; usually `option`. `planned` is
    the option that would run if the query did not explore another one.
    """

    stage: str
    option: str
    budget_ms: float
    remaining_ms: float  # below zero: the deadline has passed
    wanted: str
    planned: str

    @property
    def explores(self) -> bool:
        """Whether the option runs only to be observed; see `Run.fall_back`."""
        return self.option != self.planned


# From a stage, its chosen option, the remaining time, and the usable and sleeping options: the option to run
# and the wanted one, of which either may be another, in order to observe it.
Explore = Callable[[str, str, float, Collection[str], Collection[str]], tuple[str, str]]


class EngineReport(NamedTuple):
    """The engine's report of a request: its compute time, the time in its queue, and the exit."""

    engine_ms: float
    queue_ms: float = 0.0
    exit: str = ""


class Planner:
    """Plans queries through one measured pipeline under one policy.

    Building one may take seconds (`dynamic` computes its tables); `begin`, `start` and `finish` take
    microseconds. A planner may be shared between threads; a `Run` belongs to one query.

    **Raises:** `PipelineError` for an unknown policy, an `attainment` outside (0, 1), an option without
    measurements, or a graph that the policy cannot plan.
    """

    def __init__(
        self, pipeline: Pipeline, policy: str = "dynamic", *, attainment: float = DEFAULT_ATTAINMENT
    ) -> None:
        if not 0.0 < attainment < 1.0:
            raise PipelineError(f"attainment is {attainment}; give a share between 0 and 1, such as 0.95")
        self.pipeline = pipeline
        self.policy = policy
        self.attainment = attainment
        self._policy = build_policy(policy, pipeline, attainment)

    def begin(self, latency_slo_ms: float, elapsed_ms: float = 0.0) -> Run:
        """Begin a query with an SLO of `latency_slo_ms`, of which `elapsed_ms` have already passed.

        **Raises:** `PipelineError` for an SLO that is not a positive number.
        """
        return Run(self.pipeline, self.plan(latency_slo_ms, elapsed_ms), latency_slo_ms)

    def plan(self, latency_slo_ms: float, elapsed_ms: float = 0.0) -> Plan:
        """The policy's plan for a query. Raises the same error as `begin`."""
        if not (math.isfinite(latency_slo_ms) and latency_slo_ms > 0.0):
            raise PipelineError(f"latency_slo_ms is {latency_slo_ms}; give milliseconds above zero")
        return self._policy.begin(max(latency_slo_ms - elapsed_ms, _LEAST_MS))


class Run:
    """The progress of one query through a pipeline.

    Until `done`, start the stages in `ready` (in any order, or in parallel) and report each with `finish`:

        run = planner.begin(latency_slo_ms=20.0)
        while not run.done:
            step = run.start(run.ready[0], elapsed_ms())
            found = ask(step.stage, step.option, within_ms=step.remaining_ms)  # a Labelled
            run.finish(step.stage, found.label, elapsed_ms(), found.confidence)
        run.answer

    The option of a stage is chosen in `start`, not earlier, from the time that remains then.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        plan: Plan,
        latency_slo_ms: float,
        observe: Callable[[str, Observation], None] | None = None,
        explore: Explore | None = None,
    ) -> None:
        self.latency_slo_ms = latency_slo_ms
        self._observe = observe
        self._explore = explore
        self.labels: dict[str, str] = {}  # of finished stages
        self.steps: dict[str, Step] = {}  # of started stages
        self.skipped: set[str] = set()
        self._pipeline = pipeline
        self._plan = plan
        self._ready = [pipeline.input]
        self._undecided = {name: len(edges) for name, edges in pipeline.edges_to.items()}
        self._wanted: set[str] = set()  # stages with an edge that holds
        self._findings: dict[str, Finding] = {}

    @property
    def ready(self) -> tuple[str, ...]:
        """The stages that may start now."""
        return tuple(self._ready)

    @property
    def done(self) -> bool:
        """Whether the output stage has answered; then no stage is running or ready."""
        return self.output is not None

    @property
    def output(self) -> str | None:
        """The stage whose label is the answer, None before it has finished."""
        return next((name for name in self._pipeline.outputs if name in self.labels), None)

    @property
    def answer(self) -> str | None:
        """The label of the output stage, None before it has finished."""
        return None if self.output is None else self.labels[self.output]

    def start(
        self,
        stage: str,
        elapsed_ms: float,
        usable: Collection[str] | None = None,
        asleep: Collection[str] = (),
    ) -> Step:
        """Start a ready stage and choose its option. Raises `PipelineError` if it is not ready.

        If the plan chooses an option that is not in `usable`, the most accurate one there that leaves enough
        time for the fastest options of later stages takes its place, or else the fastest one. Options that
        are `asleep` could be used after a start: they count for `Step.wanted` only.

        A `LivePlanner` may run another usable option instead, to observe it, or want one that is asleep.
        """
        if stage not in self._ready:
            ready = ", ".join(self._ready) or "none"
            raise PipelineError(f"stage '{stage}' cannot start now; ready: {ready}")
        remaining_ms = self.latency_slo_ms - elapsed_ms
        choice = self._plan.choose(stage, remaining_ms, self._finding_for(stage))
        option = wanted = choice.option
        if usable and option not in usable:
            option = self._instead(stage, remaining_ms, usable)
            if wanted not in asleep:
                wanted = self._instead(stage, remaining_ms, {*usable, *asleep})
        planned = option
        if option == choice.option and self._explore is not None and option not in asleep:
            known = self._pipeline.stages[stage].options if usable is None else usable
            option, wanted = self._explore(stage, option, remaining_ms, known, asleep)
        self._ready.remove(stage)
        step = Step(stage, option, choice.budget_ms, remaining_ms, wanted, planned)
        self.steps[stage] = step
        return step

    def fall_back(self, stage: str, elapsed_ms: float) -> Step:
        """Start the planned option of a stage whose explored option does not answer.

        **Raises:** `PipelineError` if the stage does not run an explored option.
        """
        step = self.steps.get(stage)
        if step is None or stage in self.labels or not step.explores:
            raise PipelineError(f"stage '{stage}' does not run an explored option; finish it instead")
        step = step._replace(option=step.planned, remaining_ms=self.latency_slo_ms - elapsed_ms)
        self.steps[stage] = step
        return step

    def finish(
        self,
        stage: str,
        label: str,
        elapsed_ms: float,
        confidence: float | None = None,
        served: EngineReport | None = None,
    ) -> None:
        """Report the label of a started stage, and decide which stages run next and which are skipped.

        `confidence` is `Labelled.confidence`: with it, the next options depend on how easy this input was. A
        `LivePlanner` learns from `served`; without it, all the time counts as the engine's.

        **Raises:** `PipelineError` if the stage is not running, or has no such label.
        """
        if stage not in self.steps or stage in self.labels:
            raise PipelineError(f"stage '{stage}' is not running; start it first")
        labels = self._pipeline.stages[stage].labels
        if label not in labels:
            raise PipelineError(f"stage '{stage}' has no label '{label}'; its labels are {', '.join(labels)}")
        self.labels[stage] = label
        option = self._pipeline.stages[stage].options[self.steps[stage].option]
        level = None if confidence is None else option.level(confidence)
        if level is not None:
            self._findings[stage] = Finding(option.name, level)
        if self._observe is not None:
            took_ms = elapsed_ms - (self.latency_slo_ms - self.steps[stage].remaining_ms)
            engine_ms, queue_ms, exit = served or EngineReport(took_ms)
            before = self._finding_for(stage)
            seen = Observation(option.name, label, before, level, took_ms, engine_ms, queue_ms, exit)
            self._observe(stage, seen)
        for edge in self._pipeline.edges_from[stage]:
            self._settle(edge.target, edge.holds(label))

    def _instead(self, stage: str, remaining_ms: float, usable: Collection[str]) -> str:
        options = [each for name, each in self._pipeline.stages[stage].options.items() if name in usable]
        needed_ms = times_to_answer(self._pipeline)
        in_time = [each for each in options if needed_ms[stage, each.name] <= remaining_ms]
        if in_time:
            return max(
                in_time, key=lambda each: (each.measured_accuracy, -each.measured_latency.mean_ms)
            ).name
        return min(options, key=lambda each: each.measured_latency.mean_ms).name

    def _finding_for(self, stage: str) -> Finding | None:
        before = self._pipeline.edges_to[stage]
        return self._findings.get(before[0].source) if len(before) == 1 else None

    def _settle(self, stage: str, holds: bool) -> None:
        """Record that one more edge into `stage` is decided; after the last, it is ready or skipped."""
        self._undecided[stage] -= 1
        if holds:
            self._wanted.add(stage)
        if self._undecided[stage]:
            return
        if stage in self._wanted:
            self._ready.append(stage)
            return
        self.skipped.add(stage)
        for edge in self._pipeline.edges_from[stage]:
            self._settle(edge.target, False)


def times_to_answer(pipeline: Pipeline) -> dict[tuple[str, str], float]:
    """The mean time in ms of each option, with that of the fastest options after it on the longest path."""
    fastest = {
        name: min(option.measured_latency.mean_ms for option in stage.options.values())
        for name, stage in pipeline.stages.items()
    }
    onward = longest(pipeline, fastest)[1]
    return {
        (name, option.name): option.measured_latency.mean_ms + onward[name] - fastest[name]
        for name, stage in pipeline.stages.items()
        for option in stage.options.values()
    }
