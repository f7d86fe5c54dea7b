"""Recent inputs with the base model's answers, and what its blocks hand on for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.composition.load import Served
from gati.errors import AdaptError
from gati.exploration.library import SELECT
from gati.exploration.splits import held_out
from gati.model.segments import TracedModel

_BATCH = 32  # a sixth less work than with 64: what one layer hands to the next stays near
_SURE = 0.95  # share of what is taught that is the base model's own
_STRETCH = 10  # inputs in a row that are dealt to the same part


@dataclass(frozen=True)
class Window:
    """n inputs, oldest first, with what the base model answered.

    `inputs` are preprocessed, float32 [n, ...]; `base_class` is int64 [n]; `base_probabilities` [n, K] make
    better teachers than classes alone; `weights` [n] say how much each counts in training, recent ones more.
    `hidden` holds hidden outputs, block name -> [n, ...], where they are known already. `number` [n] counts
    all that was ever sampled; None: from 0.
    """

    inputs: Tensor
    base_class: NDArray[np.int64]
    base_probabilities: Tensor | None = None
    weights: NDArray[np.float64] | None = None
    hidden: Mapping[str, Tensor] = field(default_factory=dict)
    number: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        parts: dict[str, Tensor | NDArray[Any] | None] = {
            "base_class": self.base_class,
            "base_probabilities": self.base_probabilities,
            "weights": self.weights,
            "number": self.number,
            **{f"hidden {name}": each for name, each in self.hidden.items()},
        }
        for name, part in parts.items():
            if part is not None and len(part) != len(self.inputs):
                raise AdaptError(f"the window has {len(self.inputs)} inputs, but {len(part)} of {name}")
        if self.weights is not None and not (np.isfinite(self.weights).all() and (self.weights >= 0).all()):
            raise AdaptError("the weights of a window must be finite and none below 0")

    def __len__(self) -> int:
        return len(self.inputs)

    def collected(self, traced: TracedModel, blocks: Collection[str]) -> Window:
        """The same window with the hidden outputs of `blocks` known, from one pass of the base model.

        What comes after the last of the blocks is not run. The network is not changed.
        """
        missing = [name for name in traced.blocks if name in blocks and name not in self.hidden]
        return replace(self, hidden={**self.hidden, **_hidden(traced, self.inputs, missing)})

    def teacher(self, classes: int) -> Tensor:
        """Log-probabilities [n, K] to imitate, never quite sure.

        Students of few inputs would else all be as sure as can be, and no threshold could tell them apart.
        """
        likely = self.base_probabilities
        if likely is None:
            likely = torch.nn.functional.one_hot(torch.from_numpy(self.base_class), classes)
        return (_SURE * likely.float() + (1.0 - _SURE) / classes).log()


@torch.no_grad()
def _hidden(traced: TracedModel, inputs: Tensor, blocks: list[str]) -> dict[str, Tensor]:
    if not blocks:
        return {}
    segments = traced.cut(blocks)[:-1]
    found: dict[str, list[Tensor]] = {name: [] for name in blocks}
    for rows in inputs.split(_BATCH):
        carried: tuple[Tensor, ...] = (rows.clone().to(traced.device),)
        for name, segment in zip(blocks, segments, strict=True):
            carried = segment.run(*carried)
            kept = carried[0].float().cpu()
            found[name].append(kept.clone() if segment.hidden_changes_later else kept)
    return {name: torch.cat(batches) for name, batches in found.items()}


def original_sample(served: Served, count: int, *, seed: int = 0) -> Window:
    """`count` of the inputs that the library's caches were chosen on, with the base model's answers.

    Keep it, `collected`, from one retraining to the next. Raises DataError when the inputs are gone.
    """
    inputs, split = held_out(served.library)
    rows = np.flatnonzero(split == SELECT)
    rows = np.sort(np.random.default_rng(seed).permutation(rows)[:count])
    images = inputs.images(rows)
    traced = served.engine.traced
    with torch.inference_mode():
        scores = torch.cat([traced.base(part.clone().to(traced.device)) for part in images.split(_BATCH)])
    likely = scores.softmax(1) if served.model.outputs_kind == "logits" else scores
    return Window(images, scores.argmax(1).cpu().numpy(), likely.float().cpu().clone())


class Parts(NamedTuple):
    """Rows of a window: to train on, and to lay settings on; int64 each."""

    fit: NDArray[np.int64]
    select: NDArray[np.int64]


def split_window(count: int, held_share: float, number: NDArray[np.int64] | None = None) -> Parts:
    """Keep back `held_share` of a window to lay settings on.

    Stretches of the whole window are dealt, so that training misses nothing that happened, the latest
    included. Stretches, because next-door frames of a video are nearly the same: dealt one by one, each would
    have its twin in another part. Which part a stretch is dealt to follows from the `number` of its inputs
    alone, so that a window that has moved on keeps back what earlier versions were not trained on either.
    """
    if not 0.0 < held_share < 1.0:
        raise AdaptError(f"held_share is {held_share!r}, must lie strictly between 0 and 1, for example 0.25")
    rows = np.arange(count)
    begun = (rows if number is None else number) // _STRETCH * held_share + 1e-9  # stretches kept back so far
    kept = np.floor(begun + held_share) != np.floor(begun)
    return Parts(rows[~kept], rows[kept])
