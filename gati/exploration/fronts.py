"""The weightless first layers of predictors, such as pooling, run once per batch for all that share them.

A hidden output of 56 x 56 pixels holds ten times as many values as a predictor reads. Training needs only the
pooled output, so the large one is neither copied to float32 nor kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

import torch
from torch import Tensor, nn

from gati.caches import AverageAndMaximum, FeatureMap, FirstToken, Reader, TokenMean, runs_in_order

_WITHOUT_WEIGHTS = (
    FeatureMap,
    AverageAndMaximum,
    FirstToken,
    TokenMean,
    Reader,
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.PixelUnshuffle,
    nn.ZeroPad2d,
)

Front = tuple[str, str]  # a block, and the operation on its hidden output


def split_front(predictor: nn.Module) -> tuple[nn.Sequential, nn.Module]:
    """Split off the weightless first layers of a predictor; there may be none.

    Both parts share the predictor's layers; run one after the other, they equal the predictor.
    """
    if not runs_in_order(predictor):
        return nn.Sequential(), predictor
    layers = list(predictor)
    front = list(takewhile(lambda layer: isinstance(layer, _WITHOUT_WEIGHTS), layers))
    return nn.Sequential(*front), nn.Sequential(*layers[len(front) :])


class Fronts:
    """The fronts of predictors by name, each with the block whose hidden output it reads."""

    def __init__(self, predictors: Mapping[str, tuple[str, nn.Module]]) -> None:
        self.rests: dict[str, nn.Module] = {}
        self._front_of: dict[str, Front] = {}
        self._layers: dict[Front, nn.Sequential] = {}
        for name, (block, predictor) in predictors.items():
            layers, self.rests[name] = split_front(predictor)
            self._front_of[name] = (block, " ".join(map(_described, layers)))
            self._layers.setdefault(self._front_of[name], layers)

    @torch.no_grad()
    def look(self, hidden: Mapping[str, Tensor]) -> dict[Front, Tensor]:
        """Return the output of each front for the hidden outputs, by block, in float32."""
        return {front: layers(hidden[front[0]]).float() for front, layers in self._layers.items()}

    def read(self, looked: Mapping[Front, Tensor]) -> dict[str, Tensor]:
        """Return the input of the rest of each predictor, from the result of `look`."""
        return {name: looked[front] for name, front in self._front_of.items()}


def _described(layer: nn.Module) -> str:
    """A text that is equal for layers that compute the same."""
    settings = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    return f"{type(layer).__name__}{sorted(settings.items(), key=lambda each: each[0])}"
