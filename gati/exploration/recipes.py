"""Training recipes of predictors: optimisers, learning rates, views, and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gati.exploration.muon import Muon
from gati.exploration.remembered import KEPT_TYPE

_ENOUGH_VIEWS = 300_000  # six rounds of 50,000 inputs: further ones pay only where these are shown often


@dataclass(frozen=True)
class Recipe:
    """How to train predictors.

    For inputs that are not mixed, `soft_weight` of the loss is the divergence from the base model's
    probabilities, the rest the cross-entropy of its class. Mixed inputs have no class: their loss is the
    divergence alone.
    """

    optimiser: Literal["adamw", "sgd", "muon"] = "adamw"
    learning_rate: float = 4e-3
    weight_decay: float = 1e-2
    warm_up: float = 0.15  # share of training in which the learning rate rises
    mixed: float = 0.0  # share of batches whose inputs are mixed with each other
    rounds: int | None = None  # fewest rounds of views, after which the first ones repeat; None: never
    # for so many views there is memory to keep the base model's answers; None: for all
    kept_views: int | None = None
    soft_weight: float = 0.5
    average_decay: float = 0.0  # of the running average of weights, which is the result; 0: no average
    feature_weight: float = 1.0  # of the loss on hidden outputs, if a block is named for it
    temperature: float = 2.0  # of the divergence
    longest_gradient: float | None = None  # gradients are clipped to this norm
    most_inputs: int | None = None  # per batch

    @property
    def enough_views(self) -> int | None:
        """The number of views that are worth showing twice each; None if further rounds show nothing new."""
        return _ENOUGH_VIEWS if self.mixed else None

    def keeping(self, classes: int, memory_bytes: int) -> Recipe:
        """The same if that memory keeps answers of so many classes for when their views are shown again."""
        return replace(self, kept_views=memory_bytes // (KEPT_TYPE.itemsize * classes))


EXITS = Recipe()
STUDENTS = Recipe(
    optimiser="muon",
    learning_rate=0.03,
    weight_decay=5e-4,
    mixed=0.5,
    rounds=6,
    soft_weight=1.0,
    average_decay=0.998,
)
_VECTOR_STUDENTS = replace(STUDENTS, optimiser="adamw", learning_rate=3e-3, weight_decay=1e-2)
_TOKEN_STUDENTS = Recipe(  # tokens are neither mixed nor augmented, so further rounds show nothing new
    learning_rate=3e-3,
    weight_decay=1e-2,
    rounds=1,
    soft_weight=1.0,
    average_decay=0.998,
)
REDUCED_NETWORK = Recipe(  # it starts from trained weights: small steps, few views
    optimiser="sgd",
    learning_rate=0.02,
    weight_decay=1e-4,
    warm_up=0.05,
    mixed=0.5,
    rounds=6,
    soft_weight=1.0,
    average_decay=0.99,
    temperature=1.0,
    longest_gradient=5.0,
    most_inputs=32,
)


def recipe_of_students(example: Tensor) -> Recipe:
    """The recipe for students of inputs like `example` [B, ...]: images and sequences, vectors, or tokens."""
    if not example.is_floating_point():
        return _TOKEN_STUDENTS
    return _VECTOR_STUDENTS if example.dim() == 2 else STUDENTS


@dataclass(frozen=True)
class Emphasis:
    """Gives less weight to inputs that an earlier cache already answers.

    `predictor` is trained, reads the network's input, and does not change. Inputs whose largest class
    probability is at least `threshold` have the weight `sure_weight`, others 1.
    """

    predictor: nn.Module
    threshold: float
    sure_weight: float = 0.2

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Weights [B] of inputs [B, ...]."""
        sure = self.predictor(images).float().softmax(1).amax(1) >= self.threshold
        return torch.where(sure, self.sure_weight, 1.0)


def make_optimiser(recipe: Recipe, parameters: Iterable[nn.Parameter], device: torch.device) -> Any:
    """Build the optimiser of a recipe for `parameters`."""
    given = list(parameters)
    fused = device.type in ("cpu", "cuda")
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(
            given, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=fused
        ),
        "sgd": lambda: torch.optim.SGD(
            given,
            lr=recipe.learning_rate,
            momentum=0.9,
            nesterov=True,
            weight_decay=recipe.weight_decay,
            fused=fused,
        ),
        "muon": lambda: Muon(given, recipe.learning_rate, weight_decay=recipe.weight_decay),
    }
    return makers[recipe.optimiser]()
