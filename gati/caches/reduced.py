"""The reduced network: a predictor at the input that starts from the network's own weights.

`reduced(128)` is the network at 128 pixels a side, `reduced(128,6)` the same with 6 of its blocks. It needs
little training to agree with the full network, which helps most when training inputs are few. Fewer pixels
reduce arithmetic, but not the time to read weights and launch layers; leaving out blocks saves that, too.
Touvron et al. 2019, "Fixing the train-test resolution discrepancy", show how much accuracy a network loses at
a resolution that it was not trained for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gati.caches.companions import Companion, Reader, Reading
from gati.caches.predictors import parse_variant, register_predictor
from gati.errors import BlockError, VariantError, one_line
from gati.model.fold import settled, trainable_without_normalisation
from gati.model.outputs import as_logits
from gati.model.portable import pack_network, unpack_network
from gati.model.shorten import (
    EndingAt,
    Kept,
    block_shapes,
    choose_blocks,
    leave_out,
    output_of,
    stages,
    without_unused,
)
from gati.model.user_code import copied
from gati.types import OutputsKind

REDUCED = "reduced"  # without arguments: chosen to fit the network
_WIDER, _WIDEST = 2, 512  # a new head has twice the channels of the block before it, at most 512
_LEAST_SIDE = 96  # pixels of the shorter side: smaller images show too little at half the size


@register_predictor(REDUCED, reads="input")
def _unbuildable(hidden_shape: tuple[int, ...], classes: int, pixels: int = 0, blocks: int = 0) -> nn.Module:
    raise ValueError("only gati explore can make it, from the network itself")


def is_reduced(variant: str) -> bool:
    """Whether a variant is the reduced network. Raises `VariantError` like `parse_variant`."""
    return parse_variant(variant)[0] == REDUCED


def default_reduced(network: nn.Module, example: Tensor) -> str | None:
    """Return the variant trained by default for inputs [B, C, H, W], or None.

    It uses 4/7 of the pixels per side (128 of 224) and keeps one block of each stage except the last, whose
    many weights are slow to read. None for small images and for networks whose blocks cannot be left out.
    """
    shorter = min(example.shape[2:]) if example.dim() == 4 else 0
    if shorter < _LEAST_SIDE:
        return None
    try:
        blocks = block_shapes(network, example)
    except BlockError:
        return None
    count = len(stages(blocks)) - 1
    return f"{REDUCED}({shorter * 4 // 7},{count})" if count else None


class ReducedNetwork(nn.Sequential):
    """Inputs of the base model [B, C, H, W] -> logits [B, K] of a reduced copy of it.

    It is trainable but stays in eval mode, with the normalisation statistics of the base model. After
    training, `companion` converts it.
    """

    def __init__(self, reading: Reading, network: nn.Module) -> None:
        layers = [Reader(reading), network]
        super().__init__(*layers, *([_Logarithm()] if reading.outputs_kind == "probabilities" else []))
        self.reading = reading
        self.eval().requires_grad_(True)

    @classmethod
    def of(cls, base: nn.Module, variant: str, example: Tensor, outputs_kind: OutputsKind) -> ReducedNetwork:
        """Make a reduced copy of `base`, in eval mode, for inputs like `example` [2 or more, C, H, W].

        A copy that ends at one of the base model's blocks gets a new head, initialised from torch's RNG.

        **Raises:** `VariantError` if the variant reduces nothing, or if the network needs a fixed image size
        or does not run without those blocks.
        """
        pixels, count = _numbers(variant, tuple(example.shape[1:]))
        reading = _reading(pixels, tuple(example.shape[1:]), outputs_kind)
        seen = Reader(reading).to(example.device)(example)
        classes = _classes(base, f"variant {variant}: the network takes no images of", seen)
        if count is None:
            return cls(reading, _trainable(base, example))
        kept, network = _shortened(base, variant, count, example)
        _classes(network, f"variant {variant}: the network does not run with {count} of its blocks on", seen)
        network = _trainable(network, example)
        if kept.ends:
            network = EndingAt(network, kept.names[-1], _head(network, kept.names[-1], seen, classes))
            reading = replace(reading, outputs_kind="logits")
        return cls(reading, network.to(example.device))

    def train(self, mode: bool = True) -> ReducedNetwork:
        """Stay in eval mode."""
        del mode
        super().train(False)
        return self

    def companion(self, example: Tensor) -> Companion:
        """Return the trained network as a cache's predictor, with normalisation folded, on the CPU.

        **Raises:** `ModelError` if the network cannot be traced or serialised.
        """
        network = settled(self[1].cpu()).requires_grad_(False)
        seen = Reader(self.reading)(example.cpu())
        if isinstance(network, EndingAt):
            network = without_unused(network, seen)
        return Companion.of(network, self.reading, seen, Path(REDUCED))


class _Logarithm(nn.Module):
    """Probabilities -> logits."""

    def forward(self, probabilities: Tensor) -> Tensor:
        return as_logits(probabilities, "probabilities")


def _numbers(variant: str, input_shape: tuple[int, ...]) -> tuple[int, int | None]:
    """Return the pixels of the shorter side and the number of blocks kept (None for all)."""
    shorter = min(input_shape[1:]) if len(input_shape) == 3 else 0
    _, numbers = parse_variant(variant)
    largest = shorter if len(numbers) == 2 else shorter - 1
    if not 1 <= len(numbers) <= 2 or not 1 <= numbers[0] <= largest:
        given = f"images of {shorter} pixels" if shorter else f"inputs of shape {input_shape}"
        fewer = f": name fewer, such as {REDUCED}({shorter // 2})" if shorter > 1 else ": leave it out"
        raise VariantError(f"variant {variant}: the network takes {given}{fewer}")
    return numbers[0], numbers[1] if len(numbers) == 2 else None


def _reading(pixels: int, input_shape: tuple[int, ...], outputs_kind: OutputsKind) -> Reading:
    """Return the resizing that scales the shorter side to `pixels`."""
    shorter = min(input_shape[1:])
    height, width = (side * pixels // shorter for side in input_shape[1:])
    factor = shorter // pixels
    if (height * factor, width * factor) == input_shape[1:]:
        return Reading(outputs_kind, pool=factor)
    return Reading(outputs_kind, size=(height, width))


@torch.inference_mode()
def _classes(network: nn.Module, refusal: str, seen: Tensor) -> int:
    """Return the network's number of classes, after checking that it runs on images like `seen`."""
    try:
        return int(network(seen.clone()).shape[1])
    except Exception as error:  # whatever the user's code raises
        size = f"{seen.shape[2]} x {seen.shape[3]} pixels"
        raise VariantError(f"{refusal} {size} ({one_line(error)}); leave it out") from error


def _shortened(base: nn.Module, variant: str, count: int, example: Tensor) -> tuple[Kept, nn.Module]:
    """Return the blocks kept, and a copy of `base` without the other removable blocks."""
    try:
        blocks = block_shapes(base, example)
        kept = choose_blocks(blocks, count)
    except BlockError as error:
        raise VariantError(f"variant {variant}: {error}") from error
    network = _copied(base, example)
    leave_out(network, [block.name for block in blocks if block.keeps_shape and block.name not in kept.names])
    return kept, network


def _trainable(network: nn.Module, example: Tensor) -> nn.Module:
    folded = trainable_without_normalisation(network, example)
    return _copied(network, example) if folded is None else folded


@torch.no_grad()
def _head(network: nn.Module, block: str, seen: Tensor, classes: int) -> nn.Module:
    """Build a head from a block's feature map to logits."""
    shape = output_of(network, block, seen).shape
    if len(shape) != 4:
        raise VariantError(f"block {block} does not return a feature map, so the network cannot end there")
    channels = min(_WIDER * shape[1], _WIDEST)
    return nn.Sequential(
        nn.Conv2d(shape[1], channels, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


def _copied(base: nn.Module, example: Tensor) -> nn.Module:
    try:
        return copied(base)
    except RuntimeError:  # an exported program cannot be deep-copied
        network = unpack_network(pack_network(base, example), Path(REDUCED))
        network.load_state_dict(base.state_dict())
        return network.to(example.device)
