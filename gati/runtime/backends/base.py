"""What executes the network: the seam between the engine and everything that can run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from gati.errors import BackendError
from gati.model.segments import Segment, TracedModel
from gati.runtime.exits import EngineExit

__all__ = [
    "BACKENDS",
    "Backend",
    "Graph",
    "GraphBackend",
    "OutputsKind",
    "Path",
    "SegmentBackend",
    "get_backend",
    "register_backend",
    "segment_backend",
]

Lookup = Callable[[Tensor], tuple[Tensor, Tensor]]
OutputsKind = Literal["logits", "probabilities"]


class Backend(ABC):
    """A way to execute a network with its exits."""

    name: ClassVar[str]

    @classmethod
    def installed(cls) -> bool:
        """Whether what it needs is there."""
        return True


@dataclass(frozen=True)
class Path:
    """The network made ready on a backend: whole as `base`, and in pieces as `segments`.

    Both are executed in the same way, so that what Gati gains is never owed to a slower baseline.
    """

    base: Callable[[Tensor], Tensor]
    segments: tuple[Segment, ...]


class SegmentBackend(Backend):
    """Runs segments and lookups as functions that the engine calls in turn, or beside each other."""

    @abstractmethod
    def path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The network cut at `blocks`."""

    @abstractmethod
    def lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """`cache` as a function of hidden outputs like `hidden` [B, ...], giving [B, K] and scores [B]."""


class Graph(ABC):
    """A compiled early-exit network for single requests, one at a time."""

    @abstractmethod
    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """For `x` [1, ...] on the CPU: probabilities [1, K], and the exit's index or the number of exits."""


class GraphBackend(Backend):
    """Runs the whole early-exit network as one compiled graph, lookups and decisions inside."""

    def early_exit(
        self, traced: TracedModel, exits: Sequence[EngineExit], outputs_kind: OutputsKind
    ) -> Graph:
        """Compile the network with `exits` in forward order; without any it is the base model.

        Raises BackendError for a network that is not on the CPU, ModelError for an operator that ONNX lacks.
        """
        return self.early_exits(traced, [exits], outputs_kind)[0]

    def early_exits(
        self, traced: TracedModel, settings: Sequence[Sequence[EngineExit]], outputs_kind: OutputsKind
    ) -> list[Graph]:
        """As `early_exit` for several settings that differ in thresholds alone, converted once."""
        from gati.graph.assemble import assemble
        from gati.graph.convert import Piece
        from gati.graph.stages import build_stages

        if traced.device.type != "cpu":
            device = traced.device.type
            raise BackendError(f"backend '{self.name}' runs on the cpu; use --backend torch on {device}")
        pieces: dict[int, Piece] = {}
        return [
            self.compile(
                assemble(build_stages(traced, exits, outputs_kind), "gati", pieces=pieces).SerializeToString()
            )
            for exits in settings
        ]

    def alone(self, module: nn.Module, example: Tensor) -> Graph:
        """Compile a module [1, ...] -> [1, K] that is no network with blocks."""
        from gati.graph.assemble import assemble
        from gati.graph.stages import Stage, Stages

        with torch.no_grad():
            classes = module(example).shape[1]
        stages = Stages((Stage(module, (example,)),), (), (), classes)
        return self.compile(assemble(stages, "gati").SerializeToString())

    @abstractmethod
    def compile(self, model: bytes) -> Graph:
        """Make an assembled ONNX model ready to run, with as many threads as torch has."""


BACKENDS: dict[str, type[Backend]] = {}
B = TypeVar("B", bound=type[Backend])


def register_backend(name: str) -> Callable[[B], B]:
    """Make a backend known under `name`."""

    def add(backend: B) -> B:
        backend.name = name
        BACKENDS[name] = backend
        return backend

    return add


def get_backend(name: str, **options: Any) -> Backend:
    """The backend called `name`.

    Raises:
        BackendError: no backend has that name, or what it needs is not installed.
    """
    if name not in BACKENDS:
        raise BackendError(f"unknown backend '{name}'; choose one of auto, {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](**options)


def segment_backend(name: str) -> SegmentBackend:
    """The backend called `name`, if it runs segments one by one. Raises BackendError as `get_backend`."""
    backend = get_backend(name)
    if not isinstance(backend, SegmentBackend):
        raise BackendError(f"backend '{name}' runs no segments one by one; use torch for that")
    return backend
