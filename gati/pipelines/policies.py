"""Policies: how much time a stage gets, and which of its options runs.

A policy is built once for a pipeline and then plans every query; the simple policies are in this module.
Budgets are those of the published system: on each path from input to output, the SLO is split equally, or in
proportion to each stage's largest latency. A stage gets the smallest budget over the paths through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gati.errors import PipelineError
from gati.pipelines.pipeline import Finding, Option, Pipeline, Stage


class Choice(NamedTuple):
    """The option of a stage, and its time budget."""

    option: str
    budget_ms: float


class Plan(Protocol):
    """A policy's plan for one query."""

    def choose(self, stage: str, remaining_ms: float, finding: Finding | None) -> Choice:
        """Choose for a stage that starts now, `remaining_ms` (perhaps below zero) before the deadline.

        `finding` is that of the previous stage; None at the input, at a join, and if unknown.
        """
        ...


class Policy(Protocol):
    """A way to choose options. `begin` must not modify it, because threads share it."""

    def begin(self, latency_slo_ms: float) -> Plan:
        """Plan one query."""
        ...


Factory = Callable[[Pipeline, float], Policy]
_Factory = TypeVar("_Factory", bound=Factory)
_REGISTRY: dict[str, Factory] = {}


def register_policy(name: str) -> Callable[[_Factory], _Factory]:
    """Register a policy: a class or function of (pipeline, attainment) that returns a `Policy`.

    `attainment` is the share of queries that should meet their SLO. Raises `PipelineError` for a used name.
    """

    def register(factory: _Factory) -> _Factory:
        if name in _REGISTRY:
            raise PipelineError(f"a policy named '{name}' is registered already; choose another name")
        _REGISTRY[name] = factory
        return factory

    return register


def policy_names() -> tuple[str, ...]:
    """Names of all policies."""
    return tuple(sorted(_REGISTRY))


def build_policy(name: str, pipeline: Pipeline, attainment: float) -> Policy:
    """The policy of that name for a measured pipeline. Raises `PipelineError` for an unknown name."""
    if name not in _REGISTRY:
        raise PipelineError(f"no policy '{name}'; choose one of {', '.join(policy_names())}")
    return _REGISTRY[name](pipeline, attainment)


class _Split:
    """Shared by the published policies: the best option of a stage that fits into a budget.

    An option fits if its latency is within the budget with probability `attainment`. If none fits, the one
    with the smallest quantile of latency at `attainment` is chosen.
    """

    def __init__(self, pipeline: Pipeline, attainment: float) -> None:
        self.needs = {
            name: [_Need(option, attainment) for option in stage.options.values()]
            for name, stage in pipeline.stages.items()
        }
        for needs in self.needs.values():
            needs.sort(key=lambda need: (-need.accuracy, need.latency_ms))

    def fitting(self, stage: str, budget_ms: float) -> str:
        """The most accurate option of `stage` that fits."""
        needs = self.needs[stage]
        for need in needs:
            if need.latency_ms <= budget_ms:
                return need.option
        return min(needs, key=lambda need: need.latency_ms).option

    def positions(self, stage: Stage, budgets_ms: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """As `fitting` for many budgets [n]: the index of each option in its stage, intp [n]."""
        needs = self.needs[stage.name]
        fits = [need.latency_ms <= budgets_ms for need in needs]
        order = list(stage.options)
        places = np.array([order.index(need.option) for need in needs], dtype=np.intp)
        soonest = min(range(len(needs)), key=lambda index: needs[index].latency_ms)
        return places[np.where(np.any(fits, axis=0), np.argmax(fits, axis=0), soonest)]


class _Need:
    def __init__(self, option: Option, attainment: float) -> None:
        self.option = option.name
        self.accuracy = option.measured_accuracy
        self.latency_ms = option.measured_latency.quantile_ms(attainment)


def _largest_ms(stage: Stage, attainment: float) -> float:
    """C_i of the published split: the largest latency among a stage's options."""
    return max(option.measured_latency.quantile_ms(attainment) for option in stage.options.values())


def longest(pipeline: Pipeline, weights: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """The largest sums of weights from the input to each stage, and from it to an output, both inclusive."""
    until: dict[str, float] = {}
    for name in pipeline.stages:
        before = [until[edge.source] for edge in pipeline.edges_to[name]]
        until[name] = weights[name] + max(before, default=0.0)
    onward: dict[str, float] = {}
    for name in reversed(list(pipeline.stages)):
        after = [onward[edge.target] for edge in pipeline.edges_from[name]]
        onward[name] = weights[name] + max(after, default=0.0)
    return until, onward


class SplitPolicy:
    """Splits the remaining SLO over the rest of each path again whenever a stage starts.

    So later stages share the time that earlier stages saved or lost, by the same rule. The budget is the
    smallest over the paths from the stage to an output.
    """

    def __init__(self, pipeline: Pipeline, attainment: float, weights: dict[str, float]) -> None:
        _, onward = longest(pipeline, weights)
        self._split = _Split(pipeline, attainment)
        self._part = {name: weights[name] / onward[name] for name in pipeline.stages}

    def begin(self, latency_slo_ms: float) -> Plan:
        """Return the same plan for every query: only the remaining time matters."""
        return self

    def choose(self, stage: str, remaining_ms: float, finding: Finding | None = None) -> Choice:
        """Choose the most accurate option that fits into the stage's part of the remaining time."""
        budget_ms = max(remaining_ms, 0.0) * self._part[stage]
        return Choice(self._split.fitting(stage, budget_ms), budget_ms)

    def positions(self, stage: Stage, remaining_ms: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """As `choose` for many remaining times [n]: the index of each option in its stage, intp [n]."""
        return self._split.positions(stage, np.maximum(remaining_ms, 0.0) * self._part[stage.name])


@register_policy("equal")
def equal(pipeline: Pipeline, attainment: float) -> SplitPolicy:
    """Equal split over the stages of each path, replanned at every stage."""
    return SplitPolicy(pipeline, attainment, dict.fromkeys(pipeline.stages, 1.0))


@register_policy("proportional")
def proportional(pipeline: Pipeline, attainment: float) -> SplitPolicy:
    """Split in proportion to each stage's largest latency, replanned at every stage."""
    return SplitPolicy(pipeline, attainment, _proportions(pipeline, attainment))


@register_policy("static")
class StaticPolicy:
    """The baseline: proportional budgets, with options that are fixed when a query begins."""

    def __init__(self, pipeline: Pipeline, attainment: float) -> None:
        weights = _proportions(pipeline, attainment)
        until, onward = longest(pipeline, weights)
        self._split = _Split(pipeline, attainment)
        self._part = {name: w / (until[name] + onward[name] - w) for name, w in weights.items()}

    def begin(self, latency_slo_ms: float) -> StaticPlan:
        """Choose the options of all stages now."""
        budgets = {stage: latency_slo_ms * part for stage, part in self._part.items()}
        return StaticPlan({stage: Choice(self._split.fitting(stage, b), b) for stage, b in budgets.items()})

    def positions(self, stage: Stage, latency_slos_ms: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """As `begin` for many SLOs [n]: the index of the option that `stage` gets, intp [n]."""
        return self._split.positions(stage, latency_slos_ms * self._part[stage.name])


class StaticPlan(NamedTuple):
    """Choices that were made when the query began."""

    choices: dict[str, Choice]

    def choose(self, stage: str, remaining_ms: float, finding: Finding | None = None) -> Choice:
        """Return the choice made at the start, whatever time remains."""
        return self.choices[stage]


def _proportions(pipeline: Pipeline, attainment: float) -> dict[str, float]:
    return {name: _largest_ms(stage, attainment) for name, stage in pipeline.stages.items()}
