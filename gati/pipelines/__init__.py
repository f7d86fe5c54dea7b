"""Pipelines of models under a latency SLO: which option of which stage runs, decided on the way.

    pipeline = load_pipeline("pipeline.toml")            # stages, options, conditions; measured
    planner = Planner(pipeline, policy="dynamic")        # once; may be shared between threads
    run = planner.begin(latency_slo_ms=20.0)             # one query
    while not run.done:
        step = run.start(run.ready[0], elapsed_ms())     # the option is chosen now, from the time left
        probabilities = ask(step.stage, step.option)
        found = pipeline.stages[step.stage].options[step.option].label(probabilities)
        run.finish(step.stage, found.label, elapsed_ms(), found.confidence)  # decides what runs next
    print(run.answer)

Stages that are `ready` together may run in parallel. Nothing in this room reads a clock or starts a
thread.

A pipeline is a TOML file of stages, options, edges and conditions (`gati.pipelines.read`; `examples/pipeline`
explains one), checked so that every query reaches exactly one output whatever the labels are
(`gati.pipelines.check`). `gati pipeline measure` stores what planning needs next to it
(`gati.pipelines.measure`). A stage's label is computed from the class probabilities of whichever network
answers, summed over groups of classes, so that one network can serve several stages
(`gati.pipelines.labels`).

Policies choose a stage's option when it starts (`gati.pipelines.policies`, where `register_policy` adds
more): `static` is the baseline that has chosen when the query began; `equal` and `proportional` are the
published splits of the remaining SLO, replanned at every stage; `dynamic`, the default, is dynamic
programming over the rest of the graph with the distributions of latencies and what the stage before
found of this input (`gati.pipelines.dynamic`).

`LivePlanner` plans with figures that follow the traffic (`gati.pipelines.following`): what options did of
late, on top of what was measured offline.
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
