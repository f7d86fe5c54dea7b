"""Eager PyTorch operators in flat functions, whose results equal those of the module bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from gati.engine.backends.base import Graph, Path, SegmentBackend, register_backend
from gati.engine.exits import Lookup
from gati.model.flatten import flatten
from gati.model.segments import TracedModel


@register_backend("torch")
class TorchBackend(SegmentBackend):
    """Runs the traced operators one by one, on the CPU or on CUDA."""

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The flat network and its segments."""
        return Path(base=traced.base, segments=traced.cut(blocks))

    def lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """The cache as one flat function, or unchanged if it cannot be flattened."""
        return flatten(cache, hidden, getattr(cache, "structure", None))


class EagerNetwork(Graph):
    """The plain network, to be timed next to graphs: each call sets torch's number of threads."""

    def __init__(self, traced: TracedModel, threads: int) -> None:
        self._traced = traced
        self._threads = threads

    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """As `Graph.answer`; class scores."""
        torch.set_num_threads(self._threads)
        return self._traced.base(x.clone()), 0
