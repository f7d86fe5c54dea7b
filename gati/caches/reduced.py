"""The network itself at a lower resolution: a predictor at the input that starts from the network's weights.

A convolutional network's cost falls with the number of pixels, so at half the side it costs about a quarter
or less. What it answers there needs little training to be what it answers at full size, which is worth most
where training inputs are few. Touvron et al. 2019, "Fixing the train-test resolution discrepancy", show how
much a network loses that was not trained at its new resolution.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from gati.caches.companions import Companion, Reader, Reading
from gati.caches.predictors import parse_variant, register_predictor
from gati.errors import VariantError, one_line
from gati.model.fold import settled, trainable_without_normalisation
from gati.model.outputs import as_logits
from gati.model.portable import pack_network, unpack_network
from gati.types import OutputsKind

REDUCED = "reduced"  # without a number, it stands for half of the pixels a side
_LEAST_SIDE = 96  # pixels of the shorter side: of smaller pictures, half of the side shows too little


@register_predictor(REDUCED, reads="input")
def _unbuildable(hidden_shape: tuple[int, ...], classes: int, pixels: int = 0) -> nn.Module:
    raise ValueError("it is made of the network itself, by gati explore alone")


def is_reduced(variant: str) -> bool:
    """Whether a variant is the network itself at fewer pixels. Raises `VariantError` as `parse_variant`."""
    return parse_variant(variant)[0] == REDUCED


def default_reduced(input_shape: tuple[int, ...]) -> str | None:
    """The variant that is trained by default, for inputs [C, H, W] large enough for one."""
    shorter = min(input_shape[1:]) if len(input_shape) == 3 else 0
    return f"{REDUCED}({shorter // 2})" if shorter >= _LEAST_SIDE else None


class ReducedNetwork(nn.Sequential):
    """What the base model is given [B, C, H, W] -> logits [B, K] of a copy of it at fewer pixels.

    It is there to be trained, and stays in evaluation mode: the statistics of normalisation are those that
    the base model was trained with. `companion` is what it is when training is over.
    """

    def __init__(self, reading: Reading, network: nn.Module) -> None:
        layers = [Reader(reading), network]
        super().__init__(*layers, *([_Logarithm()] if reading.outputs_kind == "probabilities" else []))
        self.reading = reading
        self.eval().requires_grad_(True)

    @classmethod
    def of(cls, base: nn.Module, variant: str, example: Tensor, outputs_kind: OutputsKind) -> ReducedNetwork:
        """A copy of `base`, in evaluation mode, which takes inputs like `example` [2 or more, C, H, W].

        **Raises:** `VariantError` for a variant without fewer pixels than that, or a network that takes
        pictures of one size alone.
        """
        reading = _reading(variant, tuple(example.shape[1:]), outputs_kind)
        _check(base, variant, Reader(reading).to(example.device)(example))
        folded = trainable_without_normalisation(base, example)
        return cls(reading, _copied(base, example) if folded is None else folded)

    def train(self, mode: bool = True) -> ReducedNetwork:
        """Stay in evaluation mode."""
        del mode
        super().train(False)
        return self

    def companion(self, example: Tensor) -> Companion:
        """The trained network with its normalisation folded: a cache's predictor, on the CPU.

        **Raises:** `ModelError` for a network that cannot be traced or written down.
        """
        network = settled(self[1].cpu()).requires_grad_(False)
        seen = Reader(self.reading)(example.cpu())
        return Companion.of(network, self.reading, seen, Path(REDUCED))


class _Logarithm(nn.Module):
    """Probabilities -> logits of the same."""

    def forward(self, probabilities: Tensor) -> Tensor:
        return as_logits(probabilities, "probabilities")


def _reading(variant: str, input_shape: tuple[int, ...], outputs_kind: OutputsKind) -> Reading:
    """The resizing that gives the shorter side as many pixels as the variant says."""
    shorter = min(input_shape[1:]) if len(input_shape) == 3 else 0
    _, numbers = parse_variant(variant)
    if len(numbers) != 1 or not 1 <= numbers[0] < shorter:
        given = f"pictures of {shorter} pixels" if shorter else f"inputs of shape {input_shape}"
        fewer = f": name fewer, such as {REDUCED}({shorter // 2})" if shorter > 1 else ": leave it out"
        raise VariantError(f"variant {variant}: the network takes {given}{fewer}")
    height, width = (side * numbers[0] // shorter for side in input_shape[1:])
    factor = shorter // numbers[0]
    if (height * factor, width * factor) == input_shape[1:]:
        return Reading(outputs_kind, pool=factor)
    return Reading(outputs_kind, size=(height, width))


@torch.inference_mode()
def _check(base: nn.Module, variant: str, seen: Tensor) -> None:
    try:
        base(seen.clone())
    except Exception as error:  # whatever the user's code raises
        raise VariantError(
            f"variant {variant}: the network takes no pictures of {seen.shape[2]} x {seen.shape[3]} pixels "
            f"({one_line(error)}); leave it out"
        ) from error


def _copied(base: nn.Module, example: Tensor) -> nn.Module:
    try:
        return copy.deepcopy(base)
    except RuntimeError:  # a program that was exported holds what cannot be copied
        network = unpack_network(pack_network(base, example), Path(REDUCED))
        network.load_state_dict(base.state_dict())
        return network.to(example.device)
