"""Backends run the network: the interface between the engine and a runtime."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from torch import Tensor, nn

from gati.engine.exits import EngineExit, Lookup
from gati.errors import BackendError, GatiError, StorageError, first_line, one_line
from gati.files import atomic_write_bytes
from gati.model.cuts import Segment
from gati.model.segments import TracedModel
from gati.types import OutputsKind

if TYPE_CHECKING:
    from gati.engine.graph.convert import Converter


class Backend(ABC):
    """A way to run a network with its exits.

    With a `precision` other than "f32", answers may differ from those of the user's network. With a reduced
    `lookup_precision`, results of lookups may differ from the library's tables.
    """

    name: ClassVar[str]
    precision: ClassVar[Literal["f32", "bf16", "int8"]] = "f32"
    lookup_precision: ClassVar[Literal["f32", "bf16", "int8"] | None] = None  # None: as `precision`
    same_network_as: ClassVar[str | None] = None  # a backend that runs the same network with other lookups
    devices: ClassVar[tuple[str, ...]] = ("cpu",)  # device types on which its costs can be measured
    automatic: ClassVar[tuple[str, ...]] = ()  # device types on which `--backend auto` tries it

    @classmethod
    def installed(cls) -> bool:
        """Whether the backend's packages and tools are installed."""
        return True

    @classmethod
    def in_float32(cls) -> bool:
        """Whether network and lookups compute in float32, so that the library's tables are valid."""
        return cls.precision == "f32" and cls.lookup_precision in (None, "f32")


@dataclass(frozen=True)
class Path:
    """The network prepared on a backend: as a whole, `base`, and as `segments`.

    Both are prepared in the same way, so that the gain is not due to a slower baseline.
    """

    base: Callable[[Tensor], Tensor]
    segments: tuple[Segment, ...]


class SingleExit(NamedTuple):
    """An exit on a single request's path; `position` is its index, score >= `threshold` is a hit."""

    position: int
    lookup: Lookup
    threshold: float
    overlapped: bool


class SinglePath(ABC):
    """A prepared path for single requests, including lookups and decisions. Thread-safe."""

    @abstractmethod
    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """Answer `x` [1, ...]: return the probabilities [1, K] of the exit that hit, and its index.

        If every lookup misses, return the network's class scores [1, K] and the number of exits.
        """


class SegmentBackend(Backend):
    """Runs segments and lookups as functions that the engine calls in turn or in parallel."""

    @abstractmethod
    def path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The network cut at `blocks`."""

    @abstractmethod
    def lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """`cache` as a function from hidden outputs [B, ...] to probabilities [B, K] and scores [B].

        `hidden` is an example of the hidden outputs.
        """

    def single(
        self, traced: TracedModel, segments: Sequence[Segment], exits: Mapping[str, SingleExit]
    ) -> SinglePath | None:
        """The backend's own path for single requests through `segments`; None to call them one by one.

        The keys of `exits` are blocks.
        """
        return None

    def timed_path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """As `path`, for measurements on one thread: segments run as they do in single requests."""
        return self.path(traced, blocks)

    def timed_lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """As `lookup`, for measurements: the lookup runs as it does in a single request."""
        return self.lookup(cache, hidden)


class Graph(ABC):
    """A compiled early-exit network for single requests. Thread-safe."""

    @abstractmethod
    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """Answer `x` [1, ...] on the CPU: return probabilities [1, K] and the index of the exit that hit.

        If every lookup misses, the index is the number of exits.
        """


class GraphBackend(Backend):
    """Runs the whole early-exit network as one compiled graph, including lookups and decisions.

    A `calibrated` backend needs calibration inputs [n, ...] to make a graph.
    """

    automatic: ClassVar[tuple[str, ...]] = ("cpu",)
    stored_as: ClassVar[str] = "onnx"  # format of stored graphs; backends with the same format share them
    calibrated: ClassVar[bool] = False
    needed: ClassVar[tuple[str, ...]] = ()  # packages
    extra: ClassVar[str] = ""  # of Gati, which installs them

    def __init__(self) -> None:
        missing = [name for name in self.needed if find_spec(name) is None]
        if missing:
            raise BackendError(
                f"backend '{self.name}' needs {', '.join(missing)}, not installed here: "
                f"pip install 'gati[{self.extra}]'"
            )

    @classmethod
    def installed(cls) -> bool:
        """Whether the packages are installed."""
        return all(find_spec(name) is not None for name in cls.needed)

    def early_exit(
        self,
        traced: TracedModel,
        exits: Sequence[EngineExit],
        outputs_kind: OutputsKind,
        kept: FilePath | None = None,
        threads: int | None = None,
    ) -> Graph:
        """Compile the network with `exits` in forward order; without exits, the base model.

        Conversion takes seconds, so the converted model is read from the file `kept` if it exists, else
        written to it; reading gives the file the present time. `threads` is as for `compile`. Raises
        BackendError for a network that is not on the CPU, ModelError for an operator that ONNX lacks, and
        CutError for a cut that a graph cannot express.
        """
        self._check_device(traced)
        if kept is not None and (stored := _read(kept)) is not None:
            return self._compiled_from(kept, stored, threads)
        (model,) = self.assembled(traced, [exits], outputs_kind)
        if kept is not None and kept.parent.parent.is_dir():  # else the library has moved
            with suppress(StorageError):  # it may be read-only; the next engine converts again
                atomic_write_bytes(kept, model)
        return self.compile(model, threads)

    def assembled(
        self,
        traced: TracedModel,
        settings: Sequence[Sequence[EngineExit]],
        outputs_kind: OutputsKind,
        *,
        convert: Converter | None = None,
        cuts: Collection[str] = (),
    ) -> Iterator[bytes]:
        """Yield a model for `compile` for each of `settings`, lists of exits that differ only in thresholds.

        `convert` keeps converted pieces of the network across calls. The network is also cut after the blocks
        in `cuts`; calls with the same cuts can share pieces.
        """
        from gati.engine.graph.assemble import assemble
        from gati.engine.graph.convert import Converter
        from gati.engine.graph.stages import build_stages

        self._check_device(traced)
        convert = convert or Converter()
        for exits in settings:
            stages = build_stages(traced, exits, outputs_kind, cuts)
            yield assemble(stages, "gati", convert=convert).SerializeToString()

    def _check_device(self, traced: TracedModel) -> None:
        if traced.device.type != "cpu":
            device = traced.device.type
            raise BackendError(f"backend '{self.name}' runs on the cpu; use --backend torch on {device}")

    def _compiled_from(self, kept: FilePath, model: bytes, threads: int | None) -> Graph:
        try:
            return self.compile(model, threads)
        except GatiError:
            raise
        except Exception as error:  # each runtime raises its own
            again = "run gati compose again" if self.calibrated else "it is made again"
            raise BackendError(
                f"backend '{self.name}' cannot read {kept}: {first_line(error)}; if the file is damaged, "
                f"delete it, and {again}"
            ) from error

    @abstractmethod
    def compile(self, model: bytes, threads: int | None = None) -> Graph:
        """Compile a model for a number of threads, torch's current one if None."""


def imported(package: str) -> Any:
    """The package of a runtime. Raises BackendError if it is there but cannot be imported."""
    try:
        return import_module(package)
    except Exception as error:  # a library that is missing or too old raises ImportError, OSError and others
        raise BackendError(
            f"the package {package} is installed, but cannot be imported ({one_line(error)}); install it "
            "again, or choose another --backend"
        ) from error


def _read(kept: FilePath) -> bytes | None:
    """The content of a file, None without one; it is then known to be in use, see `early_exit`."""
    try:
        content = kept.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BackendError(f"cannot read {kept}: {error.strerror or error}") from error
    with suppress(OSError):  # it may be someone else's
        os.utime(kept)
    return content


BACKENDS: dict[str, type[Backend]] = {}
B = TypeVar("B", bound=type[Backend])


def register_backend(name: str) -> Callable[[B], B]:
    """Register a backend under `name`."""

    def add(backend: B) -> B:
        backend.name = name
        BACKENDS[name] = backend
        return backend

    return add


def get_backend(name: str, **options: Any) -> Backend:
    """Return the backend named `name`.

    Raises:
        BackendError: no backend has that name, or the machine lacks what it needs.
    """
    if name not in BACKENDS:
        raise BackendError(f"unknown backend '{name}'; choose one of auto, {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](**options)


def segment_backend(name: str) -> SegmentBackend:
    """Return the backend named `name` if it runs segments. Raises BackendError otherwise."""
    backend = get_backend(name)
    if not isinstance(backend, SegmentBackend):
        raise BackendError(f"backend '{name}' cannot run segments one by one; use torch")
    return backend
