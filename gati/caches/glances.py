"""Predictors for scenes with few classes: cheap to run, trained quickly on a few hundred inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gati.caches.predictors import Geometry, feature_map, geometry, register_predictor

_SPREAD = 0.1  # of the mean spread: the least that a feature is taken to vary
_USUAL = 0.9  # share of what was seen that is as near as usual


@register_predictor("glance")
def glance(hidden_shape: tuple[int, ...], classes: int, cells: int, width: int) -> nn.Module:
    """Average over `cells` x `cells` fields -> `width` units -> classes.

    On a fixed camera most of what a network looks at stays where it is, so where something is seen says more
    than what it is made of: fine fields and few units. All of it that has weights follows the pooling, so
    training pools each input once. Without normalisation by batches: there are too few inputs for that.
    """
    layers, shape = _fields(hidden_shape, cells)
    count = shape.channels * shape.height * shape.width
    return nn.Sequential(*layers, nn.Linear(count, width), nn.ReLU(), nn.Linear(width, classes))


@register_predictor("scene")
def scene(hidden_shape: tuple[int, ...], classes: int, cells: int, width: int, prototypes: int) -> nn.Module:
    """As `glance`, sure only of what is near one of so many `prototypes` that it was shown.

    Trained on an empty road, `glance` is as sure of the first lorry; this one is not.
    """
    layers, shape = _fields(hidden_shape, cells)
    count = shape.channels * shape.height * shape.width
    return nn.Sequential(*layers, SceneHead(count, width, classes, prototypes))


def _fields(hidden_shape: tuple[int, ...], cells: int) -> tuple[list[nn.Module], Geometry]:
    shape = geometry(hidden_shape)
    fields = (min(cells, shape.height), min(cells, shape.width))
    layers = [*feature_map(hidden_shape), nn.AdaptiveAvgPool2d(fields), nn.Flatten()]
    return layers, Geometry(shape.channels, *fields)


class SceneHead(nn.Module):
    """Features [B, F] -> logits [B, classes], the smaller the less the input is like anything seen.

    Logits of an input further from the nearest prototype than usual fade, and are 0 at twice that distance:
    then all classes are alike, and a selector that goes by probabilities calls it a miss.
    """

    mean: Tensor
    scale: Tensor
    prototypes: Tensor
    usual: Tensor

    def __init__(self, features: int, width: int, classes: int, prototypes: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.register_buffer("prototypes", torch.zeros(prototypes, features))
        self.register_buffer("usual", torch.ones(()))  # squared distance
        self.layers = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, features: Tensor) -> Tensor:  # (B, F) -> (B, classes)
        """Class logits, faded by distance."""
        known = (features - self.mean) * self.scale
        logits: Tensor = self.layers(known)
        strange = self._distance(known) / self.usual
        return logits * (2.0 - strange.clamp_min(1e-6).sqrt()).clamp(0.0, 1.0)

    def _distance(self, known: Tensor) -> Tensor:
        """Mean squared difference to the nearest prototype [B, 1]."""
        cross = known @ self.prototypes.T
        squared = known.square().sum(1, keepdim=True) - 2.0 * cross + self.prototypes.square().sum(1)
        return squared.amin(1, keepdim=True).clamp_min(0.0) / known.shape[1]

    @torch.no_grad()
    def remember(self, features: Tensor) -> None:
        """Take scale, prototypes and the usual distance from what is shown, [n, F] in order of time.

        Prototypes are picked one by one, each the furthest from those before it, among every other stretch of
        inputs; the stretches between say how near is usual.
        """
        count = len(features)
        spread = features.std(0, correction=0)
        self.mean.copy_(features.mean(0))
        self.scale.copy_(1.0 / (spread + _SPREAD * spread.mean() + 1e-6))
        known = (features - self.mean) * self.scale
        stretch = torch.arange(count) * 16 // max(1, count) % 2 == 0
        shown, others = known[stretch], known[~stretch]
        apart = torch.full((len(shown),), torch.inf)
        at = 0
        for row in range(len(self.prototypes)):
            self.prototypes[row] = shown[at]
            apart = torch.minimum(apart, (shown - shown[at]).square().mean(1))
            at = int(apart.argmax())
        if len(others):
            self.usual.copy_(self._distance(others).quantile(_USUAL).clamp_min(1e-6))
