"""Segments and lookups, run in turn until a lookup hits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gati.engine.backends import SegmentBackend
from gati.engine.batching import Answer, BatchedSegment, BatchStage, segments_of
from gati.engine.checks import check_lookup
from gati.engine.exits import BASE, EngineExit, doubtful_class, tie_tolerance
from gati.engine.paths.base import RequestPath
from gati.errors import CutError
from gati.model.cuts import Segment
from gati.model.segments import TracedModel
from gati.types import OutputsKind


@dataclass(frozen=True)
class Ready:
    """A network cut at its exits, on a backend; `stages` are the segments that end with a lookup."""

    whole: Callable[[Tensor], Tensor]
    segments: tuple[Segment, ...]
    stages: tuple[BatchStage, ...]
    tolerance: float  # rows of a batch with closer results are computed again alone
    logits: bool
    changes_input: bool


def made_ready(
    backend: SegmentBackend, traced: TracedModel, exits: Sequence[EngineExit], outputs_kind: OutputsKind
) -> Ready:
    """Cut the network at `exits`, in forward order. Raises LibraryError for a lookup that does not fit."""
    path = backend.path(traced, [leaving.block for leaving in exits])
    stages = []
    carried: Any = (traced.example(),)
    with torch.inference_mode():
        for segment, leaving in zip(path.segments, exits, strict=False):
            carried = segment.run(*carried)
            lookup = backend.lookup(leaving.cache, carried[0])
            check_lookup(leaving, lookup, carried[0], traced.classes)
            batched = tuple(tensor.batched for tensor in segment.carried)
            stages.append(BatchStage(segment.run, lookup, leaving.threshold, leaving.block, batched))
    return Ready(
        path.base,
        path.segments,
        tuple(stages),
        tie_tolerance(traced.device, traced.computes_in),
        outputs_kind == "logits",
        traced.changes_input,
    )


def finest_pieces(
    backend: SegmentBackend, traced: TracedModel, exits: Sequence[EngineExit]
) -> tuple[Segment, ...]:
    """The network cut at every block, to stop soon after a hit; if that is impossible, only at the exits."""
    try:
        return backend.path(traced, traced.blocks).segments
    except CutError:  # some block cannot be cut: check for hits at the exits only
        return backend.path(traced, [leaving.block for leaving in exits]).segments


class SegmentsPath(RequestPath):
    """Calls segments and lookups in turn, for single requests and batches."""

    def __init__(self, ready: Ready) -> None:
        self._whole, self._stages = ready.whole, ready.stages
        self._last: Callable[..., Tensor] = ready.segments[-1].run
        self._tolerance, self._changes_input = ready.tolerance, ready.changes_input
        self.logits = ready.logits
        selectable = all(segment.rows_selectable for segment in ready.segments)
        self._pieces = segments_of(self._stages, self._last, self._tolerance) if selectable else None
        self._base_pieces = segments_of((), self._whole, self._tolerance)

    def answer(self, x: Tensor) -> Answer:
        """As `RequestPath.answer`."""
        carried: tuple[Tensor, ...] = (x,)
        for run, lookup, threshold, name, _ in self._stages:
            carried = run(*carried)
            probabilities, score = lookup(carried[0])
            if score.item() >= threshold:  # False for NaN
                return probabilities, name
        return self._last(*carried), BASE

    def base(self, x: Tensor) -> Tensor:
        """As `RequestPath.base`."""
        return settled_scores(self._whole, x, self._tolerance, changes_input=self._changes_input)

    def pieces(self, *, early: bool) -> tuple[BatchedSegment, ...] | None:
        """As `RequestPath.pieces`."""
        return self._pieces if early else self._base_pieces


def settled_scores(
    network: Callable[[Tensor], Tensor], x: Tensor, tolerance: float, *, changes_input: bool
) -> Tensor:
    """Class scores [B, K]; rows whose two largest scores are nearly equal are computed again alone."""
    if x.shape[0] == 1:
        return network(x)
    scores = network(x.clone() if changes_input else x)
    if scores.shape[0] > 1:
        for row in doubtful_class(scores, tolerance).nonzero().flatten().tolist():
            scores[row] = network(x[row : row + 1].contiguous())[0]
    return scores
