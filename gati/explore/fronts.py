"""What predictors begin with that holds no weights: pooling, done once a batch for all that begin alike.

A hidden output of 56 x 56 pixels holds ten times the numbers that a predictor looks at. What is trained needs
the pooled one alone, so the large one is neither copied to float32 nor kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

import torch
from torch import Tensor, nn

from gati.caches import AverageAndMaximum, FeatureMap

__all__ = ["Fronts", "split_front"]

_POOLING = (FeatureMap, nn.AdaptiveAvgPool2d, AverageAndMaximum)


def split_front(predictor: nn.Module) -> tuple[nn.Sequential, nn.Module]:
    """Split off the layers that a predictor begins with and that hold no weights; maybe none.

    Both parts share the predictor's layers; one after the other they are the predictor.
    """
    if not isinstance(predictor, nn.Sequential):
        return nn.Sequential(), predictor
    layers = list(predictor)
    front = list(takewhile(lambda layer: isinstance(layer, _POOLING), layers))
    return nn.Sequential(*front), nn.Sequential(*layers[len(front) :])


class Fronts:
    """The fronts of predictors by name, each with the block whose hidden output it reads."""

    def __init__(self, predictors: Mapping[str, tuple[str, nn.Module]]) -> None:
        self.rests: dict[str, nn.Module] = {}
        self._keys: dict[str, tuple[str, str]] = {}
        self._fronts: dict[tuple[str, str], nn.Sequential] = {}
        for name, (block, predictor) in predictors.items():
            front, self.rests[name] = split_front(predictor)
            self._keys[name] = (block, " ".join(map(_described, front)))
            self._fronts.setdefault(self._keys[name], front)

    @torch.no_grad()
    def pooled(self, hidden: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is left to read for the rest of each predictor, in float32."""
        found = {key: front(hidden[key[0]]).float() for key, front in self._fronts.items()}
        return {name: found[key] for name, key in self._keys.items()}


def _described(layer: nn.Module) -> str:
    """Layers of one description compute the same."""
    settings = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    return f"{type(layer).__name__}{sorted(settings.items(), key=lambda each: each[0])}"
