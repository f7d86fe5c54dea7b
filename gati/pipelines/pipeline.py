"""The pipeline: stages with options, edges with conditions. Plain data; `gati.pipelines.check` checks it."""

from __future__ import annotations

import os
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
    """An option served from a cache library; `composition` None means its base model without caches."""

    directory: Path
    composition: str | None = "default"


@dataclass(frozen=True)
class PlainModel:
    """An option without caches: a plain network, in a form that `gati explore` accepts."""

    model: str
    checkpoint: Path | None = None


class Finding(NamedTuple):
    """What a finished stage reveals about an input: the option that answered, and its confidence level."""

    option: str
    level: int


@dataclass(frozen=True)
class Behaviour:
    """Behaviour of an option on some kind of input, one entry for each level of its own confidence.

    `shares[i]` of the inputs get an answer of level i, with `accuracies[i]` and `latencies[i]`.
    """

    shares: tuple[float, ...]
    accuracies: tuple[float, ...]
    latencies: tuple[Distribution, ...]


@dataclass(frozen=True)
class Option:
    """One way to run a stage: its source, the labels of its outputs, its accuracy and its latency.

    `accuracy` is the share of the stage's own inputs that get the right label, `latency` the distribution
    over all exits; both are None until measured. A pipeline does not know which engine serves the option.

    `levels` are decreasing bounds of confidence that separate easy inputs from hard ones. `behaviours`
    describe the option after each finding of the previous stage: inputs that were hard there are hard here.

    `overhead` is the time of an answer outside the network: queue and transport. It is None if it was not
    measured; offline measurements never include it. `class_names` are those of the network's outputs.
    """

    name: str
    source: CacheLibrary | PlainModel
    label_map: LabelMap
    accuracy: float | None = None
    latency: Distribution | None = None
    levels: tuple[float, ...] = ()
    behaviours: Mapping[Finding | None, Behaviour] = field(default_factory=dict)
    overhead: Distribution | None = None
    class_names: tuple[str, ...] = ()

    def behaviour(self, finding: Finding | None = None) -> Behaviour:
        """The behaviour on inputs after `finding`, or on all inputs if that was not measured."""
        known = self.behaviours.get(finding) or self.behaviours.get(None)
        return known or Behaviour((1.0,), (self.measured_accuracy,), (self.network_latency,))

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
        network = self.network_latency
        return network if self.overhead is None else network.plus(self.overhead)

    @property
    def network_latency(self) -> Distribution:
        """The latency without overhead. Raises `PipelineError` if it is not measured."""
        if self.latency is None:
            raise PipelineError(f"option '{self.name}' has no latency; run gati pipeline measure")
        return self.latency

    def label(self, probabilities: Sequence[float] | npt.NDArray[np.floating]) -> Labelled:
        """The stage's label for one answer of this option, class probabilities [classes]."""
        return self.label_map(probabilities)


@dataclass(frozen=True)
class Stage:
    """A step of a pipeline. Every stage gets the query's input, and exactly one of its options answers.

    `truth` maps each of the pipeline's classes to the right label; inputs of classes without a label do not
    belong to this stage. `shares` is how often each label is right among the stage's own inputs.
    """

    name: str
    labels: tuple[str, ...]
    options: Mapping[str, Option]  # in the order of the file
    truth: LabelMap
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Edge:
    """`target` runs after `source` if its label is one of `when`; None means always."""

    source: str
    target: str
    when: frozenset[str] | None = None

    def holds(self, label: str) -> bool:
        """Whether this label of the source lets the target run."""
        return self.when is None or label in self.when


@dataclass(frozen=True)
class Pipeline:
    """A DAG of stages with one input and, whatever the labels, exactly one output.

    The input runs first. Another stage runs when all edges into it are decided and at least one holds;
    otherwise it is skipped, and no edge out of it holds. `stages` are in topological order. `outputs` are the
    stages without successors; every query runs exactly one of them. `class_names` are in the order that the
    columns of `Stage.truth` count in.
    """

    name: str
    stages: Mapping[str, Stage]
    edges: tuple[Edge, ...]
    input: str
    outputs: tuple[str, ...]
    class_names: tuple[str, ...]
    path: Path | None = field(default=None, compare=False)

    @cached_property
    def edges_from(self) -> Mapping[str, tuple[Edge, ...]]:
        """The edges out of each stage."""
        return {name: tuple(edge for edge in self.edges if edge.source == name) for name in self.stages}

    @cached_property
    def edges_to(self) -> Mapping[str, tuple[Edge, ...]]:
        """The edges into each stage."""
        return {name: tuple(edge for edge in self.edges if edge.target == name) for name in self.stages}


def describe_source(source: CacheLibrary | PlainModel, folder: Path) -> str:
    """Describe a source in one line; paths are relative to `folder`, so copied folders compare equal."""
    if isinstance(source, PlainModel):
        checkpoint = "" if source.checkpoint is None else f" {_near(source.checkpoint, folder)}"
        model = source.model
        if Path(model).is_absolute():  # a file, perhaps with the name of a callable
            model = _near(Path(model), folder.resolve())
        return f"{model}{checkpoint}"
    return f"{_near(source.directory, folder)} {source.composition or '(no caches)'}"


def _near(path: Path, folder: Path) -> str:
    if not path.is_relative_to(folder):  # perhaps only as it is written: from the working folder, or with ..
        whole, base = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
        if not whole.is_relative_to(base):
            return str(path)
        path, folder = whole, base
    return path.relative_to(folder).as_posix()
