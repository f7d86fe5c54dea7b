"""Students: small networks that read the input itself, before anything of the base model has run."""

from __future__ import annotations

from torch import nn

from gati.caches.predictors import AverageAndMaximum, register_predictor

__all__ = ["student"]


@register_predictor("student", reads="input")
def student(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    """Two 3 x 3 convolutions each at a half, a quarter and an eighth of the image's size -> classes.

    They have `width`, twice and four times as many channels. Raises `ValueError` for what is no image, or for
    one whose height or width is odd.
    """
    if len(hidden_shape) != 3 or width < 1:
        raise ValueError("a student reads images (C, H, W) and is 1 channel wide or more")
    channels, *sides = hidden_shape
    if any(side % 2 for side in sides):
        raise ValueError("height and width must be even")
    layers: list[nn.Module] = [nn.PixelUnshuffle(2)]
    before = 4 * channels
    for stage, wide in enumerate((width, 2 * width, 4 * width)):
        for stride in (1 if stage == 0 else 2, 1):
            layers += [nn.Conv2d(before, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()]
            before = wide
    return nn.Sequential(*layers, AverageAndMaximum((1, 1)), nn.Linear(2 * before, classes))
