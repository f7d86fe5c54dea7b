"""What executes the network: the seam between the engine and everything that can run a segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from gati.errors import BackendError
from gati.model.segments import Segment, TracedModel

__all__ = ["BACKENDS", "Backend", "Path", "Requests", "get_backend", "register_backend"]

Lookup = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Path:
    """The network made ready on a backend: whole as `base`, and in pieces as `segments`.

    Both are executed in the same way, so that what Gati gains is never owed to a slower baseline.
    """

    base: Callable[[Tensor], Tensor]
    segments: tuple[Segment, ...]


class Requests(ABC):
    """Single requests on an engine that compiles graphs and keeps its own tensors."""

    @abstractmethod
    def base(self, x: Tensor) -> Tensor:
        """Class scores [1, K] of the whole network for `x` [1, ...]."""

    @abstractmethod
    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """Probabilities [1, K] of the first hit and its exit's position; else scores and how many exits."""


class Backend(ABC):
    """Prepares networks and lookups for execution."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True  # answers as the network in float32 does, but for rounding
    overlaps: ClassVar[bool] = False  # whether lookups may run beside the network

    @classmethod
    def installed(cls) -> bool:
        """Whether what it needs is there."""
        return True

    @abstractmethod
    def path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The network cut at `blocks`."""

    @abstractmethod
    def lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """`cache` as a function of hidden outputs like `hidden` [B, ...], giving [B, K] and scores [B]."""

    def requests(
        self, traced: TracedModel, exits: Sequence[tuple[str, nn.Module]], thresholds: Sequence[float]
    ) -> Requests | None:
        """Base model and exits (block and cache, forward order) ready for single requests.

        None where a request is no more than segments and lookups called in turn.
        """
        return None


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
    """The backend called `name`; `auto` is the best one known here.

    Raises:
        BackendError: no backend has that name.
    """
    if name == "auto":
        name = "torch"
    if name not in BACKENDS:
        raise BackendError(f"unknown backend '{name}'; choose one of auto, {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](**options)
