"""Predictions, the exits that return them, and results that a batch may round to another decision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gati.types import BASE as BASE
from gati.types import Placement

# Kernels round differently for one row and for many. If a lookup's score or two class scores are this close
# to another decision, the input is computed again alone, so the batch never changes an answer.
# Reduced precision (TF32 on CUDA, half types) rounds more coarsely.
_TIE_TOLERANCE = 1e-4
_COARSE_TIE_TOLERANCE = 1e-2


class Prediction(NamedTuple):
    """The answer to one request: `probabilities` [K] on the CPU; `exit` is a block's name or `base`.

    `probabilities` were made in inference mode: `clone()` them to change them, or to compute gradients.
    """

    class_index: int
    probabilities: Tensor
    exit: str
    version: str
    class_name: str | None = None


@dataclass(frozen=True)
class EngineExit:
    """A learned cache at a block, as the engine uses it; score >= `threshold` is a hit.

    `cache(hidden [B, ...])` returns probabilities [B, K] and scores [B].
    """

    block: str
    cache: nn.Module
    threshold: float
    placement: Placement = "inline"
    variant: str = ""
    memory_bytes: int = 0


Lookup = Callable[[Tensor], tuple[Tensor, Tensor]]


def tie_tolerance(device: torch.device, dtype: torch.dtype) -> float:
    """The tolerance for a network that computes on `device` in `dtype`."""
    exact = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    return _TIE_TOLERANCE if exact else _COARSE_TIE_TOLERANCE


def doubtful_score(scores: Tensor, threshold: float, tolerance: float) -> Tensor:
    """Return bool [B]: whether rounding may decide if a score is a hit, because it is near the threshold."""
    if not math.isfinite(threshold):
        return torch.zeros_like(scores, dtype=torch.bool)
    return (scores - threshold).abs() <= tolerance * max(1.0, abs(threshold))


def doubtful_class(class_scores: Tensor, tolerance: float) -> Tensor:
    """Return bool [B]: whether rounding may decide a row's class: its two largest values are nearly equal."""
    first, second = class_scores.topk(2, dim=1).values.unbind(1)
    return first - second <= tolerance * first.abs().clamp(min=1.0)
