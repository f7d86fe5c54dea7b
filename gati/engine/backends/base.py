"""Backends, which execute the network: the interface between the engine and anything that can run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from torch import Tensor, nn

from gati.engine.exits import EngineExit
from gati.errors import BackendError, StorageError
from gati.files import atomic_write_bytes
from gati.model.cuts import Segment
from gati.model.segments import TracedModel
from gati.types import OutputsKind

if TYPE_CHECKING:
    from gati.engine.graph.convert import Converter

Lookup = Callable[[Tensor], tuple[Tensor, Tensor]]


class Backend(ABC):
    """A way to execute a network with its exits.

    With a `precision` other than "f32" the network itself may answer differently than the user's, with
    other `lookup_precision` the lookups than the library's tables say.
    """

    name: ClassVar[str]
    precision: ClassVar[Literal["f32", "bf16", "int8"]] = "f32"
    lookup_precision: ClassVar[Literal["f32", "bf16", "int8"] | None] = None  # where not that of the network
    same_network_as: ClassVar[str | None] = None  # the backend that differs from this one in lookups alone
    devices: ClassVar[tuple[str, ...]] = ("cpu",)  # on which kinds of device its costs can be measured
    automatic: ClassVar[bool] = False  # whether `--backend auto` tries it

    @classmethod
    def installed(cls) -> bool:
        """Whether what it needs is there."""
        return True

    @classmethod
    def in_float32(cls) -> bool:
        """Whether network and lookups compute in float32: then the library's tables tell its answers."""
        return cls.precision == "f32" and cls.lookup_precision in (None, "f32")


@dataclass(frozen=True)
class Path:
    """The network made ready on a backend: whole as `base`, and in pieces as `segments`.

    Both are executed in the same way, so that what Gati gains is never owed to a slower baseline.
    """

    base: Callable[[Tensor], Tensor]
    segments: tuple[Segment, ...]


class SingleExit(NamedTuple):
    """An exit on a single request's path, `position` in forward order; score >= `threshold` is a hit."""

    position: int
    lookup: Lookup
    threshold: float
    overlapped: bool


class SinglePath(ABC):
    """The path of single requests made ready as a whole, lookups and decisions with it.

    Any thread may ask, at any time.
    """

    @abstractmethod
    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """For `x` [1, ...]: an exit's probabilities [1, K] and its index.

        At the end of the network its class scores [1, K] and the number of exits.
        """


class SegmentBackend(Backend):
    """Runs segments and lookups as functions that the engine calls in turn or in parallel."""

    @abstractmethod
    def path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The network cut at `blocks`."""

    @abstractmethod
    def lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """`cache` as a function of hidden outputs like `hidden` [B, ...], giving [B, K] and scores [B]."""

    def single(
        self, traced: TracedModel, segments: Sequence[Segment], exits: Mapping[str, SingleExit]
    ) -> SinglePath | None:
        """Another way for single requests through `segments`, `exits` by block; None: call them in turn."""
        return None

    def timed_path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """As `path`, with segments as single requests run them; for one thread, to be timed in turn."""
        return self.path(traced, blocks)

    def timed_lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """As `lookup`, as a single request runs it, to be timed."""
        return self.lookup(cache, hidden)


class Graph(ABC):
    """A compiled early-exit network for single requests. Any thread may ask, at any time."""

    @abstractmethod
    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """For `x` [1, ...] on the CPU: probabilities [1, K], and the exit's index or the number of exits."""


class GraphBackend(Backend):
    """Runs the whole early-exit network as one compiled graph, lookups and decisions inside.

    A backend that is `calibrated` takes a look at typical inputs, [n, ...], before it makes a graph.
    """

    automatic: ClassVar[bool] = True
    stored_as: ClassVar[str] = "onnx"  # what a kept graph is; those of one kind can be shared
    calibrated: ClassVar[bool] = False

    def early_exit(
        self,
        traced: TracedModel,
        exits: Sequence[EngineExit],
        outputs_kind: OutputsKind,
        kept: FilePath | None = None,
    ) -> Graph:
        """Compile the network with `exits` in forward order; without any it is the base model.

        Converting takes seconds, so the result is written to `kept`, or read from there if it is there.
        Raises BackendError for a network that is not on the CPU, ModelError for an operator that ONNX lacks.
        """
        if kept is not None and kept.is_file():
            return self.compile(kept.read_bytes())
        (model,) = self.assembled(traced, [exits], outputs_kind)
        if kept is not None:
            with suppress(StorageError):  # a library that may only be read is converted each time
                atomic_write_bytes(kept, model)
        return self.compile(model)

    def assembled(
        self,
        traced: TracedModel,
        settings: Sequence[Sequence[EngineExit]],
        outputs_kind: OutputsKind,
        *,
        convert: Converter | None = None,
        cuts: Collection[str] = (),
    ) -> Iterator[bytes]:
        """The models of several settings that differ in thresholds alone, as `compile` takes them.

        `convert` remembers pieces of the network from one call to the next; they are the more alike the more
        `cuts` all of them have, blocks after which the network is cut also without an exit.
        """
        from gati.engine.graph.assemble import assemble
        from gati.engine.graph.convert import Converter
        from gati.engine.graph.stages import build_stages

        if traced.device.type != "cpu":
            device = traced.device.type
            raise BackendError(f"backend '{self.name}' runs on the cpu; use --backend torch on {device}")
        convert = convert or Converter()
        for exits in settings:
            stages = build_stages(traced, exits, outputs_kind, cuts)
            yield assemble(stages, "gati", convert=convert).SerializeToString()

    @abstractmethod
    def compile(self, model: bytes) -> Graph:
        """Make a model ready to run, with as many threads as torch has."""


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
