"""The whole early-exit network as one compiled graph."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from gati.engine.backends import Graph, GraphBackend
from gati.engine.batching import Answer, rows_of
from gati.engine.exits import BASE, EngineExit
from gati.engine.paths.base import RequestPath
from gati.model.segments import TracedModel
from gati.types import OutputsKind


class GraphPath(RequestPath):
    """Lookups and decisions inside one graph. `graphs` are files that store it and the base model's graph.

    Both are compiled for `threads` threads.
    """

    compiled: ClassVar[bool] = True
    logits = False  # graphs return probabilities

    def __init__(
        self,
        backend: GraphBackend,
        traced: TracedModel,
        exits: Sequence[EngineExit],
        outputs_kind: OutputsKind,
        graphs: tuple[Path, Path] | None,
        threads: int,
    ) -> None:
        self._backend, self._traced, self._outputs_kind = backend, traced, outputs_kind
        self._kept = graphs
        self._threads = threads
        self._names = (*(leaving.block for leaving in exits), BASE)
        kept = None if graphs is None else graphs[0]
        self._graph = backend.early_exit(traced, exits, outputs_kind, kept, self._threads)
        self._base: Graph | None = None
        self._base_made = threading.Lock()

    def answer(self, x: Tensor) -> Answer:
        """As `RequestPath.answer`; probabilities."""
        probabilities, position = self._graph.answer(x)
        return probabilities, self._names[position]

    def base(self, x: Tensor) -> Tensor:
        """As `RequestPath.base`; probabilities. Compiled at the first call, since serving rarely needs it."""
        graph = self._base or self._make_base()
        if x.shape[0] == 1:
            return graph.answer(x)[0]
        return torch.cat([graph.answer(row)[0] for row in rows_of(x)])

    def _make_base(self) -> Graph:
        with self._base_made:  # takes seconds; concurrent requests wait for the same graph
            if self._base is None:
                kept = None if self._kept is None else self._kept[1]
                self._base = self._backend.early_exit(
                    self._traced, (), self._outputs_kind, kept, self._threads
                )
            return self._base
