"""Predictors, small networks from a hidden output to class logits, and their registry.

A variant is a family with integer arguments, such as `fc(1024)` or `pyramid(64)`. To register your own:

    import math

    from torch import nn

    import gati
    from gati.caches import register_predictor

    @register_predictor("linear")
    def linear(hidden_shape, classes):
        values = math.prod(hidden_shape)
        return nn.Sequential(nn.Flatten(), nn.Linear(values, classes))

    gati.explore(..., variants=["linear", "pyramid(64)"])

A family that reads the network's input instead of a block's hidden output is registered with
`reads="input"`. It is offered only at the block `input`, before the network runs.

Families accept feature maps [B, C, H, W], token sequences [B, T, D] and vectors [B, D]: `feature_map`
converts each to a map first. Batch normalisation may be used: it is folded away after training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval, fuse_linear_bn_eval

from gati.errors import GatiError, VariantError, first_line, one_line

if TYPE_CHECKING:
    from jaxtyping import Float

Builder = Callable[..., nn.Module]
Reads = Literal["hidden", "input"]

PUBLISHED_VARIANTS = ("fc(1024)", "fc(512)", "pool(8192)", "pool(4096)", "conv(3,1)", "conv(5,2)")
# The reduced network or a student at the input, in suitable sizes, and the families that pay off after them.
# The published families and our less efficient ones are trained only on request.
DEFAULT_VARIANTS = ("reduced", "student", "grid(256)", "pyramid(32)", "pyramid(64)")
_GROUPS = {"default": DEFAULT_VARIANTS, "published": PUBLISHED_VARIANTS}

_PREDICTORS: dict[str, Builder] = {}
_READS: dict[str, Reads] = {}
_OF_ARGUMENTS = (TypeError, ValueError, RuntimeError)  # whose messages speak for themselves
_VARIANT = re.compile(r"^\s*([a-z][a-z0-9_-]*)\s*(?:\(\s*(\d+(?:\s*,\s*\d+)*)\s*\))?\s*$")


def register_predictor(family: str, *, reads: Reads = "hidden") -> Callable[[Builder], Builder]:
    """Register a builder `(hidden_shape, classes, *numbers) -> nn.Module` under a family name.

    `hidden_shape` excludes the batch dimension; the module maps [B, *hidden_shape] to logits [B, classes].
    With `reads="input"` it is the shape of the network's input. Registering the same function twice is
    allowed.

    **Raises:** `VariantError` if the name belongs to another builder, or for an unknown `reads`.
    """
    if reads not in ("hidden", "input"):
        raise VariantError(f"predictor family {family!r} reads {reads!r}: write 'hidden' or 'input'")

    def register(builder: Builder) -> Builder:
        owner = _PREDICTORS.get(family)
        if owner is not None and owner.__qualname__ != builder.__qualname__:
            raise VariantError(
                f"predictor family {family!r} belongs to {owner.__module__}.{owner.__qualname__}: "
                "register yours under another name"
            )
        _PREDICTORS[family] = builder
        _READS[family] = reads
        return builder

    return register


def predictor_families() -> tuple[str, ...]:
    """Return the names of all registered families, sorted."""
    return tuple(sorted(_PREDICTORS))


def reads_input(variant: str) -> bool:
    """Whether a variant reads the network's input. Raises `VariantError` as `parse_variant` does."""
    return _READS[parse_variant(variant)[0]] == "input"


def is_of_gati(variant: str) -> bool:
    """Whether a variant's family is one that Gati brings, whose builder does nothing but build.

    **Raises:** `VariantError` as `parse_variant` does.
    """
    return _PREDICTORS[parse_variant(variant)[0]].__module__.startswith("gati.")


def expand_variants(names: Iterable[str]) -> tuple[str, ...]:
    """Return the named variants without duplicates, with `default` and `published` expanded."""
    return tuple(dict.fromkeys(each for name in names for each in _GROUPS.get(name, (name,))))


def parse_variant(variant: str) -> tuple[str, tuple[int, ...]]:
    """Split `conv(3,1)` into `("conv", (3, 1))`. Raises `VariantError` if malformed or unknown."""
    match = _VARIANT.match(variant)
    if match is None or match[1] not in _PREDICTORS:
        raise VariantError(
            f"unknown variant {variant!r}: write FAMILY or FAMILY(NUMBER,...) with one of the families "
            f"{', '.join(predictor_families())}, or register your own first, with "
            "gati.caches.register_predictor"
        )
    numbers = tuple(int(number) for number in match[2].split(",")) if match[2] else ()
    return match[1], numbers


def build_predictor(variant: str, hidden_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build an untrained predictor from hidden outputs [B, *hidden_shape] to logits [B, classes].

    **Raises:** `VariantError` for an unknown family, invalid arguments, or an unsupported shape.
    """
    family, numbers = parse_variant(variant)
    if not hidden_shape or any(size < 1 for size in hidden_shape) or len(hidden_shape) > 3:
        raise VariantError(
            f"variant {variant} cannot read hidden outputs of shape {hidden_shape}: "
            "feature maps (C, H, W), tokens (T, D) and vectors (D,) are supported"
        )
    try:
        predictor = _PREDICTORS[family](hidden_shape, classes, *numbers)
    except (GatiError, OSError):
        raise
    except Exception as error:  # the user's code may raise anything; torch's is too large for the memory
        reason = first_line(error) if isinstance(error, _OF_ARGUMENTS) else one_line(error)
        raise VariantError(f"variant {variant} cannot be built for {hidden_shape}: {reason}") from error
    if not isinstance(predictor, nn.Module):
        raise VariantError(f"variant {variant}: its builder returns {predictor!r}: return an nn.Module")
    return predictor


def check_positive(**numbers: int) -> None:
    """Raise `ValueError` for a number of a variant that is below 1; the keywords name them."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1 (got {number})")


def runs_in_order(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module does no more than run its children one after the other.

    A subclass of `nn.Sequential` with a forward of its own may do more.
    """
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def fold_normalisation(module: nn.Module) -> nn.Module:
    """Return a copy in eval mode, with batch normalisations folded into the preceding conv or linear layers.

    Only consecutive children of modules that run them in order are folded; outputs stay the same.
    """
    if not runs_in_order(module):
        return module.eval()
    folded: list[nn.Module] = []
    for child in module.eval():
        before = folded[-1] if folded else None
        if isinstance(before, nn.Conv2d) and isinstance(child, nn.BatchNorm2d) and _is_tracked(child):
            folded[-1] = fuse_conv_bn_eval(before, child)
        elif isinstance(before, nn.Linear) and isinstance(child, nn.BatchNorm1d) and _follows(child, before):
            folded[-1] = fuse_linear_bn_eval(before, child)
        else:
            folded.append(fold_normalisation(child))
    return nn.Sequential(*folded).eval()


def _is_tracked(normalisation: nn.BatchNorm1d | nn.BatchNorm2d) -> bool:
    """Whether it has statistics of its own; otherwise it uses those of each batch."""
    return normalisation.running_mean is not None


def _follows(normalisation: nn.BatchNorm1d, layer: nn.Linear) -> bool:
    """Whether it normalises what a layer returns; of tokens [B, T, D], it normalises T."""
    return _is_tracked(normalisation) and normalisation.num_features == layer.out_features


# Shapes -----------------------------------------------------------------------------------------------


class Geometry(NamedTuple):
    """The shape of a hidden output as a feature map."""

    channels: int
    height: int
    width: int


def geometry(hidden_shape: tuple[int, ...]) -> Geometry:
    """Return the shape that `FeatureMap` gives a hidden output: tokens (T, D) become D channels of T x 1."""
    if len(hidden_shape) == 3:
        return Geometry(*hidden_shape)
    if len(hidden_shape) == 2:
        return Geometry(hidden_shape[1], hidden_shape[0], 1)
    return Geometry(hidden_shape[0], 1, 1)


class FeatureMap(nn.Module):
    """Tokens [B, T, D] or vectors [B, D] -> maps [B, D, T, 1] or [B, D, 1, 1]."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, hidden: Float[Tensor, "b ..."]) -> Float[Tensor, "b c h w"]:
        """Return the hidden output as a map."""
        if self.dimensions == 2:
            return hidden.transpose(1, 2).unsqueeze(3)
        return hidden.unsqueeze(2).unsqueeze(3)


def feature_map(hidden_shape: tuple[int, ...]) -> list[nn.Module]:
    """Return layers that convert a hidden output to [B, C, H, W]; none if it is already a map."""
    return [] if len(hidden_shape) == 3 else [FeatureMap(len(hidden_shape))]


def convolution(shape: Geometry, out: int, kernel: int, stride: int) -> tuple[list[nn.Module], Geometry]:
    """Return convolution + batch norm + ReLU, with the kernel clipped to the map, and the new map shape."""
    kernels = (min(kernel, shape.height | 1), min(kernel, shape.width | 1))
    strides = (min(stride, shape.height), min(stride, shape.width))
    pads = (kernels[0] // 2, kernels[1] // 2)
    layer = nn.Conv2d(shape.channels, out, kernels, strides, pads, bias=False)
    height = (shape.height + 2 * pads[0] - kernels[0]) // strides[0] + 1
    width = (shape.width + 2 * pads[1] - kernels[1]) // strides[1] + 1
    return [layer, nn.BatchNorm2d(out), nn.ReLU()], Geometry(out, height, width)


def _pool_to(shape: Geometry, values: int) -> tuple[list[nn.Module], Geometry]:
    """Average-pool a map until it holds at most `values` numbers."""
    factor = 1
    while shape.channels * math.ceil(shape.height / factor) * math.ceil(shape.width / factor) > values:
        if factor >= max(shape.height, shape.width):
            break
        factor += 1
    if factor == 1:
        return [], shape
    sizes = (math.ceil(shape.height / factor), math.ceil(shape.width / factor))
    return [nn.AdaptiveAvgPool2d(sizes)], Geometry(shape.channels, *sizes)


# The published families ---------------------------------------------------------------------------------
#
# From Balasubramanian et al., *Accelerating Deep Learning Inference via Learned Caches* (2021). The layers
# follow the authors' code (github.com/uw-mad-dash/Gati-code, Predictor/models.py), which matches the sizes in
# the paper: 8,192 x 1,024 float32 are the 33 MB of its Pool(8192). All three flatten the hidden output. Two
# changes are ours: batch normalisation during training, folded away afterwards, and pooling windows of equal
# size (see `_shrink`). It is unclear whether the paper's Conv had more than the one channel of that code.

_PUBLISHED_WIDTH = 1024


@register_predictor("fc")
def fully_connected(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    """All hidden values -> one layer of `width` units -> classes (published FC)."""
    check_positive(width=width)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(hidden_shape), width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )


@register_predictor("pool")
def pooled(hidden_shape: tuple[int, ...], classes: int, values: int) -> nn.Module:
    """All hidden values, average-pooled to `values` numbers -> 1,024 units -> classes (published Pool)."""
    if values < 1:
        raise ValueError("it must keep at least 1 value")
    layers, left = _shrink(math.prod(hidden_shape), values)
    return nn.Sequential(nn.Flatten(), *layers, fully_connected((left,), classes, _PUBLISHED_WIDTH))


@register_predictor("conv")
def convolved(hidden_shape: tuple[int, ...], classes: int, kernel: int, stride: int) -> nn.Module:
    """All hidden values -> a single-channel 1D convolution -> classes (published Conv)."""
    if kernel < 1 or stride < 1:
        raise ValueError("kernel and stride must be at least 1")
    values = math.prod(hidden_shape)
    kernel = min(kernel, values)
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, 1, values)),  # [B, 1, 1, values]: every engine supports 2D convolutions
        nn.Conv2d(1, 1, (1, kernel), (1, stride), bias=False),
        nn.BatchNorm2d(1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear((values - kernel) // stride + 1, classes),
    )


def _shrink(values: int, wanted: int) -> tuple[list[nn.Module], int]:
    """Return layers that average-pool [B, values] to [B, n] with n <= `wanted`, and n.

    If `values` is not a multiple of `wanted`, the authors' adaptive pooling uses overlapping windows; here
    they are the smallest ones of equal size. Fewer values than `wanted` stay unchanged; the authors repeat
    them, which adds no information.
    """
    window = next(size for size in range(-(-values // wanted), values + 1) if values % size == 0)
    if window == 1:
        return [], values
    row = [nn.Unflatten(1, (1, 1, values)), nn.AvgPool2d((1, window)), nn.Flatten()]
    return row, values // window


# Our own families ---------------------------------------------------------------------------------------


@register_predictor("pool-linear")
def pooled_linear(hidden_shape: tuple[int, ...], classes: int, values: int) -> nn.Module:
    """Each channel average-pooled, to at most `values` numbers -> classes: Pool without a hidden layer."""
    check_positive(values=values)
    layers, shape = _pool_to(geometry(hidden_shape), values)
    return nn.Sequential(
        *feature_map(hidden_shape), *layers, nn.Flatten(), nn.Linear(math.prod(shape), classes)
    )


@register_predictor("conv2d")
def convolved_map(hidden_shape: tuple[int, ...], classes: int, kernel: int, stride: int) -> nn.Module:
    """A 16-channel convolution of the map -> pooling to at most 4,096 numbers -> classes."""
    if kernel % 2 == 0 or kernel < 1 or stride < 1:
        raise ValueError("the kernel must be odd and the stride at least 1")
    layers, shape = convolution(geometry(hidden_shape), 16, kernel, stride)
    pool, shape = _pool_to(shape, 4096)
    return nn.Sequential(
        *feature_map(hidden_shape), *layers, *pool, nn.Flatten(), nn.Linear(math.prod(shape), classes)
    )


_LARGEST_MAP = 32  # larger maps are pooled first: convolutions on them would cost more than they save


class AverageAndMaximum(nn.Module):
    """Map [B, C, H, W] -> average and maximum over a grid, flattened to [B, 2 * C * grid * grid].

    The average says how much of a feature is present, the maximum whether it appears at all.
    """

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, values: Float[Tensor, "b c h w"]) -> Float[Tensor, "b f"]:
        """Apply both poolings and concatenate."""
        if self.grid == (1, 1):
            return torch.cat((values.mean((2, 3)), values.amax((2, 3))), dim=1)
        average = nn.functional.adaptive_avg_pool2d(values, self.grid)
        maximum = nn.functional.adaptive_max_pool2d(values, self.grid)
        return torch.cat((average, maximum), dim=1).flatten(1)


@register_predictor("grid")
def grid(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    """Average and maximum over a 4 x 4 grid -> `width` units -> classes: two small matrix products."""
    check_positive(width=width)
    shape = geometry(hidden_shape)
    cells = (min(4, shape.height), min(4, shape.width))
    return nn.Sequential(
        *feature_map(hidden_shape),
        AverageAndMaximum(cells),
        nn.Linear(2 * shape.channels * cells[0] * cells[1], width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )


@register_predictor("pyramid")
def pyramid(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    """Two convolutions on an 8 x 8 map, two twice as wide on 4 x 4, average and maximum -> classes.

    Depth buys more agreement per millisecond than width: early blocks provide only edges and textures, and
    the predictor has to replace the skipped blocks.
    """
    check_positive(width=width)
    shape = geometry(hidden_shape)
    layers = feature_map(hidden_shape)
    if max(shape.height, shape.width) > _LARGEST_MAP:
        cells = (min(_LARGEST_MAP // 2, shape.height), min(_LARGEST_MAP // 2, shape.width))
        layers.append(nn.AdaptiveAvgPool2d(cells))
        shape = Geometry(shape.channels, *cells)
    for channels, size in ((width, 8), (width, 8), (2 * width, 4), (2 * width, 4)):
        step = max(1, math.ceil(max(shape.height, shape.width) / size))
        added, shape = convolution(shape, channels, max(3, 2 * step - 1), step)
        layers += added
    return nn.Sequential(*layers, AverageAndMaximum((1, 1)), nn.Linear(2 * shape.channels, classes))
