"""The verb `gati blocks`: where caches can sit in a network, and the latency up to each block."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gati.costs.profile import measure_profile
from gati.errors import ModelError, one_line
from gati.exploration.places import find_places
from gati.model.load import LoadedModel, load_model
from gati.model.outputs import check_base_outputs
from gati.model.segments import trace
from gati.types import Profile

_REPETITIONS = 15
_SMALL, _LARGE = 32, 224  # pixels; input sizes for CIFAR and ImageNet
_ZOO_SIZES = {"gati.zoo:digits_resnet": 8}


class ModelBlocks(NamedTuple):
    """The blocks of a network with their measured latencies, for inputs of `input_shape` [C, H, W]."""

    profile: Profile
    input_shape: tuple[int, ...]


def blocks(
    model: str | Path,
    checkpoint: str | Path | None = None,
    *,
    pattern: str | None = None,
    size: tuple[int, int] | None = None,
) -> ModelBlocks:
    """Find the blocks of `model` that caches can sit after, and measure their latencies for one input.

    `pattern` selects blocks like `explore(blocks=...)`. `size` is the height and width of the inputs, by
    default the size in the model's preprocessing, else 32 or 224, whichever suits its first layer.

    **Raises:** `ModelError`, `CheckpointError`, `BlockError`; `CutError` for a network that cannot be cut.
    """
    loaded = load_model(model, checkpoint)
    example = example_inputs(loaded, size)
    names = find_places(loaded.module, pattern, example, ()).names
    profile = measure_profile(trace(loaded.module, example, names), repetitions=_REPETITIONS)
    return ModelBlocks(profile, tuple(example.shape[1:]))


@torch.inference_mode()
def example_inputs(loaded: LoadedModel, size: tuple[int, int] | None = None) -> Tensor:
    """Two inputs of noise [2, C, H, W] that the network accepts. Raises `ModelError`."""
    generator = torch.Generator().manual_seed(0)
    refusal: Exception | None = None
    sizes = [size] if size is not None else list(_sizes(loaded))
    taken = loaded.preprocessing.channels
    channels = [taken] if loaded.channels_known else [taken, 1]
    for number, (height, width) in product(channels, sizes):
        example = torch.randn(2, number, height, width, generator=generator)
        try:
            outputs = loaded.module(example)
        except (RuntimeError, ValueError, AssertionError, IndexError, TypeError) as error:
            refusal = refusal or error
            continue
        check_base_outputs(outputs)
        return example
    tried = ", ".join(f"{height}x{width}" for height, width in sizes)
    reason = one_line(refusal) if refusal else "none tried"
    raise ModelError(
        f"{loaded.source} takes no inputs of {tried} pixels ({reason}); give --size HEIGHTxWIDTH, or, if it "
        "does not take images, run gati explore with an .npz of `inputs`"
    ) from refusal


def _sizes(loaded: LoadedModel) -> Iterator[tuple[int, int]]:
    preprocessing = loaded.preprocessing
    if preprocessing.sound is not None:
        yield preprocessing.sound.mels, preprocessing.sound.frames
    if preprocessing.crop is not None:
        yield preprocessing.crop, preprocessing.crop
    elif preprocessing.size is not None:
        yield preprocessing.size
    if loaded.source in _ZOO_SIZES:
        yield _ZOO_SIZES[loaded.source], _ZOO_SIZES[loaded.source]
    first = next((layer for layer in loaded.module.modules() if isinstance(layer, nn.Conv2d)), None)
    small_first = first is not None and first.stride == (1, 1) and max(first.kernel_size) <= 3
    for pixels in (_SMALL, _LARGE) if small_first else (_LARGE, _SMALL):
        yield pixels, pixels
