"""Students: predictors that read the network's input, so that they run before any of the base model.

They read images (C, H, W), sequences (T, D), such as audio or sensor frames, and vectors (D,).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from gati.caches.predictors import AverageAndMaximum, FeatureMap, register_predictor
from gati.errors import VariantError

_LARGEST_SIDE = 112  # pixels; larger inputs are pooled first: a student does not need fine detail
_LARGEST_WHOLE_SIDE = 16  # up to here, the first convolutions work on single pixels
_LARGEST_HALVED_SIDE = 48  # up to here, on squares of 2 x 2 pixels; above, on at most 28 x 28 of 4 x 4
_LEAST_SIDE = 4
_STAGES = (1, 2, 4)  # channels, in multiples of the width
_LAYERS = 2  # convolutions per stage
_LONGEST = 256  # steps of a sequence; longer ones are pooled first
_HIDDEN_LAYERS = 2  # of a student for vectors
_LAYOUT = tuple((stage, layer) for stage in range(len(_STAGES)) for layer in range(_LAYERS))
_STEP = 8  # widths are multiples of this, to fill SIMD registers
_SHARES = (0.09, 0.18, 0.35)  # of the base model's FLOPs
_NARROWEST = 24  # narrower ones take as long, since starting a layer does, and know less
_LARGEST_SHARE = 0.6  # above this cost, a student saves little even if it is always right


class _Look(NamedTuple):
    """A student's view of an input [C, H, W]: average-pooled, then squares of pixels become channels.

    Sides are padded separately before each step to make them divisible. Padding once for both would fail:
    ONNX Runtime merges padding into the pooling after it and rejects more than a window.
    """

    channels: int
    average: tuple[int, int]  # rows and columns of pixels averaged to one
    square: int  # side of the squares
    padding: tuple[tuple[int, int], tuple[int, int]]  # rows and columns, before averaging and before squares
    height: int  # of the map that the first convolution reads
    width: int


@register_predictor("student", reads="input")
def student(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    """A small network from the input, of shape `hidden_shape` without the batch, to class logits.

    - *Images* (C, H, W) of any size and number of channels: two 3 x 3 convolutions each with `width`,
      2 `width` and 4 `width` channels, then average and maximum pooling. Squares of pixels become channels
      first, so that the convolutions are few, wide and on small maps, which every engine runs near its peak.
      Images of more than 112 pixels a side are average-pooled; sides that do not divide evenly are padded
      with zeros, the mean of a normalised input.
    - *Sequences* (T, D): the same stages along the steps T. More than 256 steps are average-pooled.
    - *Vectors* (D,): two hidden layers of `width` units.

    **Raises:** `VariantError` for images of fewer than 4 pixels a side, and for a width below 1.
    """
    _check(hidden_shape, width)
    if len(hidden_shape) == 1:
        return _of_vectors(hidden_shape[0], classes, width)
    if len(hidden_shape) == 2:
        return _of_sequences(hidden_shape, classes, width)
    return _of_images(hidden_shape, classes, width)


def _of_images(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    look = _look(hidden_shape)
    layers: list[nn.Module] = []
    first, second = look.padding
    if look.average != (1, 1):
        layers += [*_padded(first), nn.AvgPool2d(look.average)]
    if look.square > 1:
        layers += [*_padded(second), nn.PixelUnshuffle(look.square)]
    return _convolutions(layers, look.channels * look.square**2, (3, 3), classes, width)


def _of_sequences(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    steps, values = hidden_shape
    window = -(-steps // _LONGEST)
    layers: list[nn.Module] = [FeatureMap(2)]
    if window > 1:
        layers += [*_padded((-steps % window, 0)), nn.AvgPool2d((window, 1))]
    return _convolutions(layers, values, (3, 1), classes, width)


def _of_vectors(values: int, classes: int, width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(_HIDDEN_LAYERS):
        layers += [nn.Linear(values, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
        values = width
    return nn.Sequential(*layers, nn.Linear(values, classes))


def _convolutions(
    before: list[nn.Module], channels: int, kernel: tuple[int, int], classes: int, width: int
) -> nn.Module:
    padding = (kernel[0] // 2, kernel[1] // 2)
    layers = list(before)
    for stage, layer in _LAYOUT:
        stride = (2, 1 + padding[1]) if stage and not layer else (1, 1)
        out = _STAGES[stage] * width
        layers += [
            nn.Conv2d(channels, out, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        ]
        channels = out
    return nn.Sequential(*layers, AverageAndMaximum((1, 1)), nn.Linear(2 * channels, classes))


def student_operations(hidden_shape: tuple[int, ...], classes: int, width: int) -> int:
    """Return the FLOPs of `student(width)` on one input of that shape (two per multiply-add).

    Counts convolutions and linear layers only, like `torch.utils.flop_counter`, so that it is comparable with
    `gati.costs.least.Arithmetic`.
    """
    _check(hidden_shape, width)
    if len(hidden_shape) == 1:
        return 2 * width * (hidden_shape[0] + (_HIDDEN_LAYERS - 1) * width + classes)
    if len(hidden_shape) == 2:
        steps, channels = hidden_shape
        height, length, taps = -(-steps // -(-steps // _LONGEST)), 1, 3
    else:
        look = _look(hidden_shape)
        height, length, channels, taps = look.height, look.width, look.channels * look.square**2, 9
    pairs = 0
    for stage, layer in _LAYOUT:
        if stage and not layer:
            height, length = -(-height // 2), -(-length // 2)
        pairs += height * length * taps * channels * _STAGES[stage] * width
        channels = _STAGES[stage] * width
    return 2 * (pairs + 2 * channels * classes)


def student_widths(hidden_shape: tuple[int, ...], classes: int, base_operations: int) -> tuple[int, ...]:
    """Return student widths worth training, ascending: about 9 %, 18 % and 35 % of the base model's FLOPs.

    `base_operations` is the base model's FLOPs on one input (two per multiply-add). Widths are multiples of
    8. Fewer than three are returned if the base model is so small that neighbours coincide, or that some are
    narrower than 24 and others are not, and none if the smallest student costs more than 60 % of it.

    **Raises:** `VariantError` for inputs that `student` cannot read.
    """
    chosen = set()
    for share in _SHARES:
        wanted = share * base_operations
        width = _STEP
        while student_operations(hidden_shape, classes, width + _STEP) <= wanted:
            width += _STEP
        nearest = min(
            (width, width + _STEP),
            key=lambda each: abs(math.log(student_operations(hidden_shape, classes, each) / max(1, wanted))),
        )
        if student_operations(hidden_shape, classes, nearest) <= _LARGEST_SHARE * base_operations:
            chosen.add(nearest)
    return tuple(sorted({width for width in chosen if width >= _NARROWEST} or chosen))


def _check(hidden_shape: tuple[int, ...], width: int) -> None:
    if not 1 <= len(hidden_shape) <= 3:
        raise VariantError(
            f"a student reads images (C, H, W), sequences (T, D) and vectors (D,), not inputs of shape "
            f"{hidden_shape}: leave it out with --variants"
        )
    if len(hidden_shape) == 3 and min(hidden_shape[1:]) < _LEAST_SIDE:
        raise VariantError(
            f"a student needs images of at least {_LEAST_SIDE} pixels a side, not of shape {hidden_shape}: "
            "leave it out with --variants"
        )
    if width < 1:
        raise VariantError(f"student({width}): the width must be at least 1")


def _look(hidden_shape: tuple[int, ...]) -> _Look:
    channels, *sides = hidden_shape
    windows = [-(-side // _LARGEST_SIDE) for side in sides]
    seen = [-(-side // window) for side, window in zip(sides, windows, strict=True)]
    longest = max(seen)
    square = 1 if longest <= _LARGEST_WHOLE_SIDE else 2 if longest <= _LARGEST_HALVED_SIDE else 4
    cells = [-(-side // square) for side in seen]
    before = [count * window - side for count, window, side in zip(seen, windows, sides, strict=True)]
    after = [count * square - side for count, side in zip(cells, seen, strict=True)]
    padding = ((before[0], before[1]), (after[0], after[1]))
    return _Look(channels, (windows[0], windows[1]), square, padding, cells[0], cells[1])


def _padded(missing: tuple[int, int]) -> list[nn.Module]:
    rows, columns = missing
    if not rows and not columns:
        return []
    return [nn.ZeroPad2d((columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))]
