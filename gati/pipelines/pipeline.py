"""The pipeline: stages with options, edges with conditions. Plain data, checked by `check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gati.errors import PipelineError
from gati.pipelines.distribution import Distribution
from gati.pipelines.labels import Labelled, LabelMap


@dataclass(frozen=True)
class CacheLibrary:
    """An option that a cache library serves; `composition` None runs its base model without any cache."""

    directory: Path
    composition: str | None = "default"


@dataclass(frozen=True)
class PlainModel:
    """An option that is a plain network, in a form that `gati explore` accepts, without caches."""

    model: str
    checkpoint: Path | None = None


class Finding(NamedTuple):
    """What a finished stage reveals about an input: the option that answered, and its confidence level."""

    option: str
    level: int


@dataclass(frozen=True)
class Behaviour:
    """Behaviour of an option on some kind of input, one entry for each level of its own confidence.

    `shares` of the inputs get an answer of that level, with that accuracy and that latency.
    """

    shares: tuple[float, ...]
    accuracies: tuple[float, ...]
    latencies: tuple[Distribution, ...]


@dataclass(frozen=True)
class Option:
    """One way to run a stage: its source, the meaning of its outputs, its accuracy and its latency.

    `accuracy` is the share of the stage's own inputs that get the right label, `latency` how long one takes,
    exits and all; both None until measured. What answers requests to it is not the pipeline's business.

    `levels` are falling confidences that tell easy inputs from hard ones, and `behaviours` what the option
    does with inputs on which the stage before it found something: an input that was hard there is hard here.

    `overhead` is what an answer takes besides the network: the queue, and the way there and back. None where
    it was not measured, as offline.
    """

    name: str
    source: CacheLibrary | PlainModel
    label_map: LabelMap
    accuracy: float | None = None
    latency: Distribution | None = None
    levels: tuple[float, ...] = ()
    behaviours: Mapping[Finding | None, Behaviour] = field(default_factory=dict)
    overhead: Distribution | None = None

    def behaviour(self, finding: Finding | None = None) -> Behaviour:
        """The behaviour on inputs after `finding`, or on all inputs if that was not measured."""
        known = self.behaviours.get(finding) or self.behaviours.get(None)
        return known or Behaviour((1.0,), (self.measured_accuracy,), (self._network_latency,))

    def level(self, confidence: float) -> int:
        """The level of an answer: 0 for the most confident."""
        return sum(confidence < bound for bound in self.levels)

    @property
    def measured_accuracy(self) -> float:
        """The accuracy. Raises `PipelineError` if it is not measured."""
        if self.accuracy is None:
            raise PipelineError(f"option '{self.name}' has no accuracy; run gati pipeline measure")
        return self.accuracy

    @cached_property
    def measured_latency(self) -> Distribution:
        """The latency, overhead included. Raises `PipelineError` if it is not measured."""
        network = self._network_latency
        return network if self.overhead is None else network.plus(self.overhead)

    @property
    def _network_latency(self) -> Distribution:
        if self.latency is None:
            raise PipelineError(f"option '{self.name}' has no latency; run gati pipeline measure")
        return self.latency

    def label(self, probabilities: Sequence[float] | npt.NDArray[np.floating]) -> Labelled:
        """The stage's label for one answer of this option, class probabilities [classes]."""
        return self.label_map(probabilities)


@dataclass(frozen=True)
class Stage:
    """A step of a pipeline. Every stage gets the query's input; exactly one of its options answers.

    `truth` says which label is right for an input of each of the pipeline's classes; inputs of classes with
    no label are not this stage's. `shares` says how often each label is right among the stage's own inputs.
    """

    name: str
    labels: tuple[str, ...]
    options: Mapping[str, Option]  # in the order of the file
    truth: LabelMap
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Edge:
    """`target` runs after `source`, when `source` says one of the labels in `when`; None means always."""

    source: str
    target: str
    when: frozenset[str] | None = None

    def holds(self, label: str) -> bool:
        """Whether this label of the source lets the target run."""
        return self.when is None or label in self.when


@dataclass(frozen=True)
class Pipeline:
    """A DAG of stages with one input and, whatever the labels, exactly one output.

    A stage runs when everything before it has been decided and at least one edge into it holds; otherwise it
    is skipped, and no edge out of it holds. `stages` are in an order in which each follows all before it.
    `outputs` are the stages that nothing follows; of several, every query runs exactly one.
    """

    name: str
    stages: Mapping[str, Stage]
    edges: tuple[Edge, ...]
    input: str
    outputs: tuple[str, ...]
    path: Path | None = field(default=None, compare=False)

    @cached_property
    def edges_from(self) -> Mapping[str, tuple[Edge, ...]]:
        """The edges out of each stage."""
        return {name: tuple(edge for edge in self.edges if edge.source == name) for name in self.stages}

    @cached_property
    def edges_to(self) -> Mapping[str, tuple[Edge, ...]]:
        """The edges into each stage."""
        return {name: tuple(edge for edge in self.edges if edge.target == name) for name in self.stages}

    def stage(self, name: str) -> Stage:
        """The stage of that name. Raises `PipelineError` when there is none."""
        if name not in self.stages:
            raise PipelineError(f"no stage '{name}' in {self.name}; there are {', '.join(self.stages)}")
        return self.stages[name]


def describe_source(source: CacheLibrary | PlainModel, folder: Path) -> str:
    """The source of an option in one line; paths are relative to `folder`, so that copies agree."""
    if isinstance(source, PlainModel):
        checkpoint = "" if source.checkpoint is None else f" {_near(source.checkpoint, folder)}"
        return f"{source.model}{checkpoint}"
    return f"{_near(source.directory, folder)} {source.composition or '(no caches)'}"


def _near(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
