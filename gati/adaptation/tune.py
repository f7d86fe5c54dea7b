"""Short training of predictors on hidden outputs that are already computed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gati.caches import SceneHead, build_predictor, distillation_loss, fold_normalisation, runs_in_order
from gati.errors import AdaptError
from gati.priority import let_requests_pass

_SPREAD = 1e-2  # added to the standard deviation of features that hardly vary
_WARM_UP = 0.1


@dataclass(frozen=True)
class TuneRecipe:
    """Hyperparameters: `epochs` over the lesson, but at most `limit_s` seconds of processor time.

    On a busy machine, training takes longer instead of learning less.
    """

    epochs: float = 6.0
    limit_s: float = 0.4
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2


@dataclass(frozen=True)
class Lesson:
    """Training data: hidden outputs [n, ...], target log-probabilities [n, K], and weights [n].

    The first `of_window` inputs are from the window, in order of time, the rest are not; None: all are.
    """

    hidden: Tensor
    teacher: Tensor
    weights: Tensor
    of_window: int | None = None

    def __post_init__(self) -> None:
        if len(self.hidden) == 0 or not bool(self.weights.sum() > 0):
            raise AdaptError("there is nothing to train on: no inputs, or none with a weight above 0")

    @property
    def recent(self) -> slice:
        """The window's own inputs."""
        return slice(self.of_window)


def tuned(
    predictor: nn.Module,
    lesson: Lesson,
    recipe: TuneRecipe,
    *,
    seed: int,
    clock: Callable[[], float] = time.thread_time,
) -> nn.Module:
    """A fine-tuned copy of `predictor`."""
    student = copy.deepcopy(predictor).cpu()
    before, learner = _after_pooling(student)
    _train(learner, _features(before, lesson.hidden), lesson, recipe, seed, clock)
    return student.eval().requires_grad_(False)


def train_new(
    variant: str,
    hidden_shape: tuple[int, ...],
    lesson: Lesson,
    recipe: TuneRecipe,
    *,
    seed: int,
    clock: Callable[[], float] = time.thread_time,
) -> nn.Module:
    """A predictor of that variant, trained from scratch and ready to serve.

    If its first layer with weights is linear, it is trained on standardised features; the standardisation is
    folded into the layer afterwards.
    """
    classes = lesson.teacher.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = build_predictor(variant, hidden_shape, classes)
    before, learner = _after_pooling(student)
    features = _features(before, lesson.hidden)
    first = next(iter(learner), None)
    if isinstance(first, SceneHead):
        first.remember(features[lesson.recent])
    if not isinstance(first, nn.Linear) or features.ndim != 2:
        _train(learner, features, lesson, recipe, seed, clock)
        return fold_normalisation(student).requires_grad_(False)
    mean, spread = features.mean(0), features.std(0, correction=0) + _SPREAD
    _train(learner, (features - mean) / spread, lesson, recipe, seed, clock)
    with torch.no_grad():
        first.weight.div_(spread)
        if first.bias is None:
            first.bias = nn.Parameter(torch.zeros(first.out_features))
        first.bias.sub_(first.weight @ mean)
    return fold_normalisation(student).requires_grad_(False)


def _after_pooling(predictor: nn.Module) -> tuple[nn.Sequential, nn.Sequential]:
    """Leading layers without weights, which see each input once, and the rest, which is trained."""
    layers = list(predictor) if runs_in_order(predictor) else [predictor]
    count = next(
        (at for at, layer in enumerate(layers) if any(True for _ in layer.parameters())), len(layers)
    )
    return nn.Sequential(*layers[:count]), nn.Sequential(*layers[count:])


@torch.no_grad()
def _features(before: nn.Sequential, hidden: Tensor) -> Tensor:
    if len(before) == 0:
        return hidden
    return torch.cat([before(rows) for rows in hidden.split(256)])


def _train(
    learner: nn.Sequential,
    features: Tensor,
    lesson: Lesson,
    recipe: TuneRecipe,
    seed: int,
    clock: Callable[[], float],
) -> None:
    """AdamW with a learning rate that warms up, then decays to zero by the last step or the time limit."""
    generator = torch.Generator().manual_seed(seed)
    steps = max(1, round(recipe.epochs * len(features) / recipe.batch_size))
    batch = min(recipe.batch_size, len(features))
    if features.ndim == 4:
        features = features.contiguous(memory_format=torch.channels_last)
    learner.train().requires_grad_(True)
    with torch.enable_grad():
        optimiser = torch.optim.AdamW(
            learner.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        began = clock()  # not before: the first optimiser of a process imports half of torch, for seconds
        done = 0.0
        for step in range(steps):
            let_requests_pass()
            rows = torch.multinomial(lesson.weights, batch, replacement=True, generator=generator)
            loss = distillation_loss(learner(features[rows]), lesson.teacher[rows])
            optimiser.zero_grad()
            loss.backward()
            rate = min((step + 1) / steps / _WARM_UP, 1.0 - done, 1.0)
            for group in optimiser.param_groups:
                group["lr"] = recipe.learning_rate * max(rate, 0.0)
            optimiser.step()
            done = max((step + 1) / steps, (clock() - began) / recipe.limit_s)
            if done >= 1.0:
                break
    learner.eval().requires_grad_(False)
