"""Pipelines of models under a latency SLO: each stage's option is chosen when the stage starts.

    pipeline = load_pipeline("pipeline.toml")            # stages, options, conditions; measured
    planner = Planner(pipeline, policy="dynamic")        # built once; may be shared between threads
    run = planner.begin(latency_slo_ms=20.0)             # one query
    while not run.done:
        step = run.start(run.ready[0], elapsed_ms())     # chooses the option now, from the remaining time
        probabilities = ask(step.stage, step.option)
        found = pipeline.stages[step.stage].options[step.option].label(probabilities)
        run.finish(step.stage, found.label, elapsed_ms(), found.confidence)  # decides what runs next
    print(run.answer)

Stages that are `ready` at the same time may run in parallel. This package reads no clock and starts no
threads.

A pipeline is a TOML file of stages, options, edges and conditions (`gati.pipelines.read`; `examples/pipeline`
explains one). `gati.pipelines.check` verifies that every query reaches exactly one output, whatever the
labels are. `gati pipeline measure` stores latencies and accuracies next to the file
(`gati.pipelines.measure`). A stage's label is computed from the class probabilities of the network that
answers, summed over groups of classes, so one network can serve several stages (`gati.pipelines.labels`).

Policies choose a stage's option (`gati.pipelines.policies`, where `register_policy` adds more):

- `static`, the baseline, chooses all options when the query begins;
- `equal` and `proportional` are the published splits of the remaining SLO, computed again at every stage;
- `dynamic`, the default, is dynamic programming over the rest of the graph. It uses the distributions of
  latencies, and the confidence of the previous stage's answer to this input (`gati.pipelines.dynamic`).

`LivePlanner` combines offline measurements with recent observations of the options
(`gati.pipelines.following`).
"""

from __future__ import annotations

from gati.errors import PipelineError
from gati.pipelines.decayed import DecayedCounts, DecayedHistogram
from gati.pipelines.distribution import Distribution
from gati.pipelines.dynamic import DynamicPolicy, Forecast
from gati.pipelines.figures import Agreement, LiveSettings
from gati.pipelines.following import LivePlanner, OptionReport
from gati.pipelines.labels import Labelled, LabelMap
from gati.pipelines.pipeline import (
    Behaviour,
    CacheLibrary,
    Edge,
    Finding,
    Option,
    Pipeline,
    PlainModel,
    Stage,
)
from gati.pipelines.planner import DEFAULT_ATTAINMENT, EngineReport, Planner, Run, Step
from gati.pipelines.policies import Choice, Plan, Policy, policy_names, register_policy
from gati.pipelines.read import load_pipeline, parse_pipeline

__all__ = [
    "DEFAULT_ATTAINMENT",
    "Agreement",
    "Behaviour",
    "CacheLibrary",
    "Choice",
    "DecayedCounts",
    "DecayedHistogram",
    "Distribution",
    "DynamicPolicy",
    "Edge",
    "Finding",
    "Forecast",
    "LabelMap",
    "Labelled",
    "LivePlanner",
    "LiveSettings",
    "Option",
    "OptionReport",
    "Pipeline",
    "PipelineError",
    "PlainModel",
    "Plan",
    "Planner",
    "Policy",
    "Run",
    "EngineReport",
    "Stage",
    "Step",
    "load_pipeline",
    "parse_pipeline",
    "policy_names",
    "register_policy",
]
