"""The pieces of an early-exit network as modules of one input: each segment with the lookup at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from gati.errors import CutError
from gati.model.program import FlatFunction
from gati.model.segments import TracedModel
from gati.runtime.exits import EngineExit

__all__ = [
    "INPUT",
    "OUTPUTS",
    "ExitStage",
    "LastStage",
    "Stage",
    "Stages",
    "build_stages",
    "float32_at_least",
]

INPUT = "input"
OUTPUTS = ("probabilities", "exit", "score")


class ExitStage(nn.Module):
    """A segment and its lookup: carried tensors in; carried tensors, probabilities and score out."""

    def __init__(self, run: FlatFunction, cache: nn.Module) -> None:
        super().__init__()
        self.run = run
        self.cache = cache

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Return what the rest of the network needs, then probabilities [1, K] and score [1]."""
        # Copies, because a segment may work in place on what it is given.
        handed_on = self.run(*(tensor.clone() for tensor in carried))
        probabilities, score = self.cache(handed_on[0])
        return (*handed_on, _as_float32(probabilities), _as_float32(score))


class LastStage(nn.Module):
    """The last segment: carried tensors in, class probabilities [1, K] out."""

    def __init__(self, run: FlatFunction, *, logits: bool) -> None:
        super().__init__()
        self.run = run
        self.logits = logits

    def forward(self, *carried: Tensor) -> Tensor:
        """Return the base model's probabilities."""
        scores: Tensor = self.run(*(tensor.clone() for tensor in carried))
        return _as_float32(scores.softmax(1) if self.logits else scores)


class Stage(NamedTuple):
    """A piece of the network with an example of what it takes, for batch size 1."""

    module: nn.Module
    example: tuple[Tensor, ...]


@dataclass(frozen=True)
class Stages:
    """The early-exit network for one input: stage i ends with the lookup of exit i, the last one with none.

    `thresholds` are the exits' as float32: a float32 score reaches one exactly where it reaches the other.
    """

    stages: tuple[Stage, ...]
    exits: tuple[EngineExit, ...]
    thresholds: tuple[float, ...]
    classes: int

    def trail(self, x: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Probabilities [K] and score of every stage for one input [1, ...]; the last one has no score."""
        trail: list[tuple[Tensor, Tensor | None]] = []
        carried: tuple[Tensor, ...] = (x,)
        with torch.inference_mode():
            for stage in self.stages[:-1]:
                *handed_on, probabilities, score = stage.module(*carried)
                carried = tuple(handed_on)
                trail.append((probabilities[0], score[0]))
            trail.append((self.stages[-1].module(*carried)[0], None))
        return trail


def build_stages(
    traced: TracedModel, exits: Sequence[EngineExit], outputs_kind: Literal["logits", "probabilities"]
) -> Stages:
    """Cut the network at its exits and put the lookups in.

    **Raises:** `CutError` where two tensors that cross a cut share memory that is changed later: a file has
    no such thing as shared memory.
    """
    segments = traced.cut([leaving.block for leaving in exits])
    for segment in segments:
        if not segment.rows_selectable:
            raise CutError(
                f"cannot export the cut after block '{segment.block}': tensors that cross it share memory "
                "which the network changes later; compose without this block"
            )
    stages = []
    carried: tuple[Tensor, ...] = (traced.example(),)
    with torch.inference_mode():
        for segment, leaving in zip(segments, exits, strict=False):
            stage = ExitStage(segment.run, leaving.cache).eval()
            stages.append(Stage(stage, carried))
            carried = tuple(stage(*carried)[:-2])
    last = LastStage(segments[-1].run, logits=outputs_kind == "logits").eval()
    stages.append(Stage(last, carried))
    return Stages(
        stages=tuple(Stage(module, tuple(map(_plain, example))) for module, example in stages),
        exits=tuple(exits),
        thresholds=tuple(float32_at_least(leaving.threshold) for leaving in exits),
        classes=traced.classes,
    )


def float32_at_least(threshold: float) -> float:
    """The least float32 that is not below `threshold`: comparing float32 scores with it decides the same."""
    nearest = torch.tensor(threshold, dtype=torch.float64).float()
    if nearest.double().item() < threshold:
        nearest = torch.nextafter(nearest, torch.tensor(math.inf))
    return nearest.item()


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float32 else tensor.float()


def _plain(tensor: Tensor) -> Tensor:
    """A copy outside inference mode, contiguous, as exporters want their examples."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
