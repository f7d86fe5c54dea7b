"""The pieces of an early-exit network as modules with batch size 1: segments, and lookups at their ends."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gati.engine.exits import EngineExit
from gati.errors import CutError
from gati.model.program import FlatFunction
from gati.model.segments import TracedModel
from gati.types import OutputsKind

INPUT = "input"
OUTPUTS = ("probabilities", "exit", "score")


class _Segment(nn.Module):
    """A segment: takes and returns the carried tensors."""

    def __init__(self, run: FlatFunction) -> None:
        super().__init__()
        self.run = run

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that the rest of the network needs, the hidden output first."""
        # Copies, because a segment may modify its inputs in place.
        outputs: tuple[Tensor, ...] = self.run(*(tensor.clone() for tensor in carried))
        return outputs


class _LastSegment(nn.Module):
    def __init__(self, run: FlatFunction, *, logits: bool) -> None:
        super().__init__()
        self.run = run
        self.logits = logits

    def forward(self, *carried: Tensor) -> Tensor:
        """Return the base model's probabilities."""
        scores: Tensor = self.run(*(tensor.clone() for tensor in carried))
        return _as_float32(scores.softmax(1) if self.logits else scores)


class _Lookup(nn.Module):
    """A lookup: takes a hidden output, returns probabilities [1, K] and a score [1]."""

    def __init__(self, cache: nn.Module) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the lookup."""
        probabilities, score = self.cache(hidden)
        return _as_float32(probabilities), _as_float32(score)


class GraphStage(NamedTuple):
    """A piece of the network with example inputs of batch size 1.

    Within one network, pieces with the same `key` are equal, so each key is converted only once.
    """

    module: nn.Module
    example: tuple[Tensor, ...]
    key: Hashable = None


@dataclass(frozen=True)
class GraphStages:
    """The early-exit network for batch size 1: segments, each but the last followed by an optional lookup.

    `thresholds` are those of the exits, rounded up to float32, which decides equally for float32 scores.
    """

    segments: tuple[GraphStage, ...]
    lookups: tuple[GraphStage | None, ...]  # one per segment; None without an exit
    exits: tuple[EngineExit, ...]
    thresholds: tuple[float, ...]
    classes: int

    @property
    def example(self) -> Tensor:
        """An input of the network, [1, ...]."""
        return self.segments[0].example[0]

    def trail(self, x: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Probabilities [K] and score of every exit for one input [1, ...].

        The last entry has the network's probabilities, with None as score.
        """
        trail: list[tuple[Tensor, Tensor | None]] = []
        carried: tuple[Tensor, ...] = (x,)
        with torch.inference_mode():
            for segment, lookup in zip(self.segments[:-1], self.lookups, strict=False):
                carried = segment.module(*carried)
                if lookup is not None:
                    probabilities, score = lookup.module(carried[0])
                    trail.append((probabilities[0], score[0]))
            trail.append((self.segments[-1].module(*carried)[0], None))
        return trail


def build_stages(
    traced: TracedModel,
    exits: Sequence[EngineExit],
    outputs_kind: OutputsKind,
    cuts: Collection[str] = (),
) -> GraphStages:
    """Cut the network at its exits and after the blocks in `cuts`, and insert the lookups.

    **Raises:** `CutError` if two tensors that cross a cut share memory that is changed later, which a graph
    cannot express.
    """
    at = {leaving.block: leaving for leaving in exits}
    segments = traced.cut([block for block in traced.blocks if block in at or block in cuts])
    for segment in segments:
        if not segment.rows_selectable:
            raise CutError(
                f"cannot export the cut after block '{segment.block}': tensors that cross it share memory "
                "which the network changes later; compose without this block"
            )
    pieces: list[GraphStage] = []
    lookups: list[GraphStage | None] = []
    carried: tuple[Tensor, ...] = (traced.example(),)
    before: str | None = None
    with torch.inference_mode():
        for segment in segments[:-1]:
            module = _Segment(segment.run).eval()
            pieces.append(_stage(module, carried, (before, segment.block)))
            carried = module(*carried)
            before = segment.block
            leaving = at.get(segment.block or "")
            lookups.append(
                None
                if leaving is None
                else _stage(_Lookup(leaving.cache).eval(), carried[:1], (segment.block, leaving.cache))
            )
    last = _LastSegment(segments[-1].run, logits=outputs_kind == "logits").eval()
    return GraphStages(
        segments=(*pieces, _stage(last, carried, (before, None))),
        lookups=(*lookups, None),
        exits=tuple(exits),
        thresholds=tuple(float32_at_least(leaving.threshold) for leaving in exits),
        classes=traced.classes,
    )


def _stage(module: nn.Module, example: Sequence[Tensor], key: Hashable) -> GraphStage:
    return GraphStage(module, tuple(map(_plain, example)), key)


def float32_at_least(threshold: float) -> float:
    """The smallest float32 >= `threshold`: comparing float32 scores with either gives the same result."""
    with np.errstate(over="ignore", under="ignore"):  # to infinity, and of the smallest numbers
        nearest = np.float32(threshold)
        exact = float(nearest) >= threshold
        return float(nearest if exact else np.nextafter(nearest, np.float32(np.inf)))


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float32 else tensor.float()


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous copy outside inference mode, as exporters require."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
