"""Predictors for scenes with few classes: cheap to run, quick to train on a few hundred inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gati.caches.predictors import Geometry, check_positive, feature_map, geometry, register_predictor

_SPREAD = 0.1  # added to each feature's standard deviation, as a share of the mean one
_USUAL = 0.9  # quantile of distances that counts as usual


@register_predictor("glance")
def glance(hidden_shape: tuple[int, ...], classes: int, cells: int, width: int) -> nn.Module:
    """Average pooling to `cells` x `cells` -> `width` units -> classes.

    In front of a fixed camera most things stay in place, so position says more than texture: use a fine grid
    and few units. All weights come after the pooling, so training pools each input only once. There is no
    batch normalisation, because training inputs are few.
    """
    check_positive(cells=cells, width=width)
    layers, shape = _fields(hidden_shape, cells)
    count = shape.channels * shape.height * shape.width
    return nn.Sequential(*layers, nn.Linear(count, width), nn.ReLU(), nn.Linear(width, classes))


@register_predictor("scene")
def scene(hidden_shape: tuple[int, ...], classes: int, cells: int, width: int, prototypes: int) -> nn.Module:
    """Like `glance`, but confident only near one of `prototypes` stored training inputs.

    Trained on an empty road, `glance` is just as confident about the first lorry; `scene` is not.
    """
    check_positive(cells=cells, width=width, prototypes=prototypes)
    layers, shape = _fields(hidden_shape, cells)
    count = shape.channels * shape.height * shape.width
    return nn.Sequential(*layers, SceneHead(count, width, classes, prototypes))


def _fields(hidden_shape: tuple[int, ...], cells: int) -> tuple[list[nn.Module], Geometry]:
    shape = geometry(hidden_shape)
    fields = (min(cells, shape.height), min(cells, shape.width))
    layers = [*feature_map(hidden_shape), nn.AdaptiveAvgPool2d(fields), nn.Flatten()]
    return layers, Geometry(shape.channels, *fields)


class SceneHead(nn.Module):
    """Features [B, F] -> logits [B, classes] that shrink as the input gets less like the training inputs.

    Beyond the usual distance to the nearest prototype logits fade, and reach 0 at twice that distance. All
    classes are then equally likely, so a selector based on probabilities reports a miss.
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
        """Return class logits, faded by distance."""
        known = (features - self.mean) * self.scale
        logits: Tensor = self.layers(known)
        strange = self._distance(known) / self.usual
        return logits * (2.0 - strange.clamp_min(1e-6).sqrt()).clamp(0.0, 1.0)

    def _distance(self, known: Tensor) -> Tensor:
        """Return the mean squared difference to the nearest prototype, [B, 1]."""
        cross = known @ self.prototypes.T
        squared = known.square().sum(1, keepdim=True) - 2.0 * cross + self.prototypes.square().sum(1)
        return squared.amin(1, keepdim=True).clamp_min(0.0) / known.shape[1]

    @torch.no_grad()
    def remember(self, features: Tensor) -> None:
        """Fit scale, prototypes and the usual distance to features [n, F] in temporal order.

        The inputs are cut into 16 stretches. Prototypes come from every other stretch by farthest-point
        sampling; the remaining stretches set the usual distance.
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
