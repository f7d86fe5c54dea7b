"""Students: predictors that read the network's input, so that nothing of the base model runs before them."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from gati.caches.predictors import AverageAndMaximum, register_predictor
from gati.errors import VariantError

__all__ = ["student", "student_operations", "student_widths"]

_LARGEST_SIDE = 112  # pixels; larger inputs are averaged first: a student looks at the whole, not at hairs
_LARGEST_WHOLE_SIDE = 16  # up to here the first convolutions work on single pixels
_LARGEST_HALVED_SIDE = 48  # up to here on squares of 2 x 2 pixels, above on 4 x 4: at most 28 x 28 of them
_LEAST_SIDE = 4
_STAGES = (1, 2, 4)  # channels, in multiples of the width
_LAYERS = 2  # convolutions a stage
_STEP = 8  # widths are multiples of it: what processors compute at once
_SHARES = (0.09, 0.18, 0.35)  # of the base model's multiplications and additions
_LARGEST_SHARE = 0.6  # a student that costs more than this saves little even if it is always right


class _Look(NamedTuple):
    """A student's view of an input [C, H, W]: averaged, then squares of pixels become channels.

    Sides are padded before either to what it divides; not all at once before both, because ONNX Runtime
    merges padding into the pooling after it and refuses more than a window.
    """

    channels: int
    average: tuple[int, int]  # rows and columns of pixels averaged to one
    square: int  # side of the squares
    padding: tuple[tuple[int, int], tuple[int, int]]  # rows and columns, before averaging and before squares
    height: int  # of the map that the first convolution reads
    width: int


@register_predictor("student", reads="input")
def student(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    """Two 3 x 3 convolutions each of `width`, 2 `width`, 4 `width` channels, average and maximum -> classes.

    `hidden_shape` is the shape (C, H, W) of the network's input, of any size and number of channels. Squares
    of pixels become channels first, so the convolutions are few, wide and on small maps, which every engine
    runs near its peak. Pictures of more than 112 pixels a side are averaged to fewer; sides that do not
    divide are padded with zeros, the mean of a normalised input.

    **Raises:** `VariantError` for vectors and tokens, for pictures of fewer than 4 pixels a side, and for a
    width below 1.
    """
    look = _look(hidden_shape, width)
    layers: list[nn.Module] = []
    first, second = look.padding
    if look.average != (1, 1):
        layers += [*_padded(first), nn.AvgPool2d(look.average)]
    if look.square > 1:
        layers += [*_padded(second), nn.PixelUnshuffle(look.square)]
    channels = look.channels * look.square**2
    for stage, multiple in enumerate(_STAGES):
        for layer in range(_LAYERS):
            stride = 2 if stage and not layer else 1
            out = multiple * width
            layers += [nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            channels = out
    return nn.Sequential(*layers, AverageAndMaximum((1, 1)), nn.Linear(2 * channels, classes))


def student_operations(hidden_shape: tuple[int, ...], classes: int, width: int) -> int:
    """Multiplications and additions, two for each pair, of `student(width)` on one input [C, H, W].

    Counted as `torch.utils.flop_counter` counts, in convolutions and linear layers alone, so that it compares
    with what `gati.costs.least.Arithmetic` counts of a network.
    """
    look = _look(hidden_shape, width)
    height, length, channels = look.height, look.width, look.channels * look.square**2
    pairs = 0
    for stage, multiple in enumerate(_STAGES):
        if stage:
            height, length = -(-height // 2), -(-length // 2)
        for _ in range(_LAYERS):
            pairs += height * length * 9 * channels * multiple * width
            channels = multiple * width
    return 2 * (pairs + 2 * channels * classes)


def student_widths(hidden_shape: tuple[int, ...], classes: int, base_operations: int) -> tuple[int, ...]:
    """Widths of students worth training, rising: about 9 %, 18 % and 35 % of the base model's arithmetic.

    `base_operations` are the multiplications and additions, two for each pair, of the base model on one
    input. Widths are multiples of 8. Fewer than three where the base model is so small that neighbours
    coincide, and none where the smallest student costs more than 60 % of it.

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
    return tuple(sorted(chosen))


def _look(hidden_shape: tuple[int, ...], width: int) -> _Look:
    if len(hidden_shape) != 3:
        raise VariantError(
            f"a student reads pictures (C, H, W), not inputs of shape {hidden_shape}: "
            "leave it out with --variants"
        )
    if min(hidden_shape[1:]) < _LEAST_SIDE:
        raise VariantError(
            f"a student needs pictures of {_LEAST_SIDE} pixels a side or more, not of shape {hidden_shape}: "
            "leave it out with --variants"
        )
    if width < 1:
        raise VariantError(f"student({width}): the width must be 1 or more")
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
