"""Companions: the user's own networks, used as predictors that read the input.

A companion is stored as data, as a traced program and weights, so that a cache library no longer needs the
network's code or checkpoint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from gati.model.fold import without_normalisation
from gati.model.outputs import as_logits
from gati.model.portable import pack_network, unpack_network
from gati.types import OutputsKind

_VARIANT = re.compile(r"companion\([A-Za-z0-9._-]+\)")


def is_companion(variant: str) -> bool:
    """Whether a variant is a companion, which has its own weights and cannot be built from its name."""
    return _VARIANT.fullmatch(variant) is not None


@dataclass(frozen=True)
class Reading:
    """How a companion reads the base model's inputs [B, C, H, W], and what its outputs mean.

    Inputs are average-pooled over `pool` x `pool` pixels, resized to `size` (height, width), then multiplied
    by `scale` and shifted by `shift` per channel; empty or None skips a step. `classes` gives the companion's
    output index of each base model class; None means the same order.
    """

    outputs_kind: OutputsKind
    scale: tuple[float, ...] = ()
    shift: tuple[float, ...] = ()
    pool: int = 1
    size: tuple[int, int] | None = None
    classes: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; `from_json` restores them exactly."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Reading:
        """Read what `to_json` wrote. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
        size, classes = values["size"], values["classes"]
        if values["outputs_kind"] not in get_args(OutputsKind):
            raise ValueError(f"outputs of kind {values['outputs_kind']!r}")
        return cls(
            outputs_kind=values["outputs_kind"],
            scale=tuple(float(value) for value in values["scale"]),
            shift=tuple(float(value) for value in values["shift"]),
            pool=int(values["pool"]),
            size=None if size is None else (int(size[0]), int(size[1])),
            classes=None if classes is None else tuple(int(value) for value in classes),
        )


class Reader(nn.Module):
    """Inputs of the base model [B, C, H, W] -> inputs of a companion, which are safe to modify in place."""

    scale: Tensor
    shift: Tensor

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.reading = reading
        for name, values in (("scale", reading.scale), ("shift", reading.shift)):
            self.register_buffer(
                name, torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1), persistent=False
            )

    def forward(self, x: Tensor) -> Tensor:
        """The companion's input."""
        own = x
        if self.reading.pool > 1:
            own = nn.functional.avg_pool2d(own, self.reading.pool)
        if self.reading.size is not None:
            own = nn.functional.interpolate(own, self.reading.size, mode="bilinear", align_corners=False)
        if self.reading.scale:
            own = own * self.scale + self.shift
        return own.clone() if own is x else own


class Companion(nn.Module):
    """Inputs of the base model [B, C, H, W] -> another network's logits for the base model's classes.

    `program` comes from `pack_network`; the weights are 0 until loaded. `where` is used in error messages.
    Copying and unpickling rebuild the network from the program.

    **Raises:** `ModelError` if the program cannot be read.
    """

    order: Tensor

    def __init__(self, program: bytes, reading: Reading, where: Path) -> None:
        super().__init__()
        self.program, self.reading, self.where = program, reading, where
        self.reader = Reader(reading)
        self.network = unpack_network(program, where)
        order = torch.tensor(reading.classes or (), dtype=torch.int64)
        self.register_buffer("order", order, persistent=False)

    @classmethod
    def of(cls, network: nn.Module, reading: Reading, example: Tensor, where: Path) -> Companion:
        """Make a companion from `network`, in eval mode; `example` [2 or more, ...] is an input for it.

        **Raises:** `ModelError` if the network cannot be traced or serialised.
        """
        lean = without_normalisation(network, example)
        made = cls(pack_network(lean, example), reading, where)
        made.network.load_state_dict(lean.state_dict())
        return made.eval().requires_grad_(False)

    @property
    def structure(self) -> tuple[object, ...]:
        """A key that is equal for companions that differ only in their weights."""
        return hashlib.sha256(self.program).hexdigest(), self.reading

    def forward(self, x: Tensor) -> Tensor:
        """Class logits [B, K]."""
        scores = as_logits(self.network(self.reader(x)), self.reading.outputs_kind)
        return scores if self.reading.classes is None else scores.index_select(1, self.order)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle through the program, because the network built from it cannot be copied."""
        return _rebuilt, (self.program, self.reading, self.where, dict(self.state_dict()))


def _rebuilt(program: bytes, reading: Reading, where: Path, weights: dict[str, Tensor]) -> Companion:
    made = Companion(program, reading, where)
    made.load_state_dict(weights)
    made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as for learned caches
    return made.eval().requires_grad_(False)
