"""Recent inputs with the base model's answers, and what its blocks hand on for them."""

from __future__ import annotations

import math
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
from gati.exploration.memory import USABLE, available_bytes
from gati.exploration.splits import held_out
from gati.model.segments import TracedModel
from gati.priority import let_requests_pass

BATCH = 32  # a sixth faster than 64: activations stay in the processor's cache
_SURE = 0.95  # weight of the base model's probabilities in the targets
_STRETCH = 10  # consecutive inputs that go to the same part
_GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0
_COPIES = 2  # of one block's hidden outputs, while a cache is trained on them
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Window:
    """n inputs, oldest first, with the base model's answers.

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
        """The same window with the hidden outputs of `blocks`, from one pass through the base model.

        Layers after the last of the blocks are not run. The network is not changed.
        """
        missing = [name for name in traced.blocks if name in blocks and name not in self.hidden]
        return replace(self, hidden={**self.hidden, **_hidden(traced, self.inputs, missing)})

    def newest(self, count: int) -> Window:
        """The last `count` inputs, or all if there are fewer."""
        rows = slice(-count, None)
        return Window(
            self.inputs[rows],
            self.base_class[rows],
            None if self.base_probabilities is None else self.base_probabilities[rows],
            None if self.weights is None else self.weights[rows],
            {name: hidden[rows] for name, hidden in self.hidden.items()},
            None if self.number is None else self.number[rows],
        )

    def teacher(self, classes: int) -> Tensor:
        """Smoothed target log-probabilities [n, K].

        Without smoothing, predictors trained on few inputs saturate, and no threshold can separate them.
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
    found: dict[str, Tensor] = {}
    itself, begin = traced.changes_itself, 0
    for rows in inputs.split(_rows(traced)):
        carried: tuple[Tensor, ...] = (rows.clone().to(traced.device),)
        if itself:  # once alone with the network, this thread would wait for requests that wait for it
            let_requests_pass()
        with traced.alone():
            for name, segment in zip(blocks, segments, strict=True):
                if not itself:
                    let_requests_pass()
                carried = segment.run(*carried)
                if name not in found:
                    found[name] = torch.empty((len(inputs), *carried[0].shape[1:]))
                found[name][begin : begin + len(rows)] = carried[0]  # copied: later segments may change it
        begin += len(rows)
    return found


def _rows(traced: TracedModel) -> int:
    """Inputs to run at once; one if requests have to wait meanwhile."""
    return 1 if traced.changes_itself else BATCH


def _scores(traced: TracedModel, rows: Tensor) -> Tensor:
    with traced.alone():
        scores: Tensor = traced.base(rows.clone().to(traced.device))
        return scores.clone() if traced.changes_itself else scores


def original_sample(served: Served, count: int, *, seed: int = 0) -> Window:
    """`count` of the inputs that the library's caches were chosen on, with the base model's answers.

    Reuse it, `collected`, for later retrainings. Raises DataError if the inputs no longer exist.
    """
    inputs, split = held_out(served.library)
    rows = np.flatnonzero(split == SELECT)
    rows = np.sort(np.random.default_rng(seed).permutation(rows)[:count])
    images = inputs.images(rows)
    traced = served.engine.traced
    with torch.inference_mode():
        scores = torch.cat([_scores(traced, part) for part in images.split(_rows(traced))])
    likely = scores.softmax(1) if served.model.outputs_kind == "logits" else scores
    return Window(images, scores.argmax(1).cpu().numpy(), likely.float().cpu().clone())


def most_inputs(traced: TracedModel, blocks: Collection[str], original: Window | None = None) -> int | None:
    """How many inputs can be trained on at those blocks, and on `original`, in the available memory.

    None if it is not known.
    """
    available = available_bytes()
    if available is None or not blocks:
        return None
    sizes = {name: _FLOAT_BYTES * math.prod(traced.hidden_shapes[name]) for name in blocks}
    copies = _COPIES * max(sizes.values())
    taken = 0
    if original is not None:  # what it holds already is no longer available
        taken = len(original) * (copies + sum(sizes[name] for name in blocks if name not in original.hidden))
    return int((USABLE * available - taken) / (sum(sizes.values()) + copies))


class Parts(NamedTuple):
    """Rows of a window, int64: to train on, and to choose settings on."""

    fit: NDArray[np.int64]
    select: NDArray[np.int64]


def split_window(count: int, held_share: float, number: NDArray[np.int64] | None = None) -> Parts:
    """Hold out the share `held_share` of a window to choose settings on.

    Short stretches from all over the window are held out, so that training covers all of it, including the
    latest inputs. Stretches, because adjacent video frames are nearly equal: split one by one, each would
    have a near-duplicate in the other part. The part of a stretch depends only on the `number` of its inputs,
    so a later window holds out inputs that earlier versions were not trained on either. The golden ratio
    deals them out evenly, also where every second number, or third, belongs to another model of the store.
    """
    if not 0.0 < held_share < 1.0:
        raise AdaptError(f"held_share is {held_share!r}, must lie strictly between 0 and 1, for example 0.25")
    rows = np.arange(count)
    kept = (rows if number is None else number) // _STRETCH * _GOLDEN_RATIO % 1.0 < held_share
    return Parts(rows[~kept], rows[kept])
