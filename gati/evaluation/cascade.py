"""A cascade of two base models: a smaller network answers if it is confident, else the larger one runs.

The smaller network has its own cache library, which says how to load it and preprocess its inputs. Its
threshold is the loosest that keeps the target agreement with the larger network on the select split. Nothing
is certified.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.composition.batches import in_fitting_batches
from gati.engine.engine import Engine
from gati.engine.exits import Prediction
from gati.errors import DataError
from gati.evaluation.timing import BenchEntry
from gati.exploration.library import SELECT, Library
from gati.exploration.splits import held_out

SMALLER = "smaller network"  # Prediction.exit of its answers
_NEVER = 2.0  # above any probability


@dataclass
class Cascade(BenchEntry):
    """Runs `smaller` first and returns its answer if the largest probability is at least `threshold`."""

    smaller: Engine | None = None
    threshold: float = _NEVER

    def answer(self, x: Tensor) -> Prediction:
        """Answer one request [1, ...]."""
        if self.smaller is None:
            raise AssertionError("a cascade has a smaller network")
        (first,) = self.smaller.base(x)
        if float(first.probabilities.max()) >= self.threshold:
            return first._replace(exit=SMALLER)
        return self.engine.base(x)[0]


def build_cascade(
    larger: Library, smaller: Library, engine: Engine, small_engine: Engine, accuracy: float
) -> Cascade:
    """Combine two engines of the same backend, with a threshold set for an agreement of `accuracy`.

    Raises:
        DataError: the networks differ in inputs or classes, or the held-out inputs are missing.
    """
    for what in ("preprocessing", "input_shape", "classes", "class_names"):
        if getattr(larger.manifest, what) != getattr(smaller.manifest, what):
            raise DataError(f"the two networks of a cascade differ in {what.replace('_', ' ')}")
    return Cascade(
        f"cascade {engine.backend}",
        engine,
        early=False,
        many=False,
        smaller=small_engine,
        threshold=_threshold(larger, small_engine, smaller.manifest.outputs_kind, accuracy),
    )


@torch.inference_mode()
def _threshold(library: Library, smaller: Engine, kind: str, accuracy: float) -> float:
    inputs, split = held_out(library)
    rows = np.flatnonzero(split == SELECT)
    network = smaller.traced

    def images(indices: NDArray[np.int64]) -> Tensor:
        return inputs.images(rows[indices]).to(network.device)

    def scores(batch: Tensor) -> Tensor:
        found: Tensor = network.base(batch).float().cpu()
        return found

    outputs = torch.cat(list(in_fitting_batches(len(rows), images, scores)))
    probabilities = outputs if kind == "probabilities" else outputs.softmax(1)
    score, predicted = (values.numpy() for values in probabilities.max(1))
    wrong = predicted != library.base_outcomes().base_class[rows]
    order = np.argsort(-score, kind="stable")
    lost = np.cumsum(wrong[order])
    last_of_equals = np.append(score[order][:-1] > score[order][1:], True)
    good = np.flatnonzero(last_of_equals & (lost <= (1.0 - accuracy) * len(rows)))
    return float(score[order][good[-1]]) if len(good) else _NEVER
