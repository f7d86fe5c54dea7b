"""A predictor for scenes with few classes: cheap to run, trained on a few hundred inputs in a moment."""

from __future__ import annotations

from torch import nn

from gati.caches.predictors import feature_map, geometry, register_predictor

__all__ = ["glance"]


@register_predictor("glance")
def glance(hidden_shape: tuple[int, ...], classes: int, cells: int, width: int) -> nn.Module:
    """Average over `cells` x `cells` fields -> `width` units -> classes.

    On a fixed camera most of what a network looks at stays where it is, so where something is seen says more
    than what it is made of: fine fields and few units. All of it that has weights follows the pooling, so
    training pools each input once. Without normalisation by batches: there are too few inputs for that.
    """
    shape = geometry(hidden_shape)
    fields = (min(cells, shape.height), min(cells, shape.width))
    return nn.Sequential(
        *feature_map(hidden_shape),
        nn.AdaptiveAvgPool2d(fields),
        nn.Flatten(),
        nn.Linear(shape.channels * fields[0] * fields[1], width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )
