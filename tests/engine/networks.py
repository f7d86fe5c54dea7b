"""Small networks and learned caches with weights that nobody trained, for the runtime's tests."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from gati.engine.exits import EngineExit
from gati.model.segments import TracedModel, trace
from gati.types import Placement

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
CLASSES = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x)
        hidden += x
        return torch.relu(hidden)


class Network(nn.Module):
    """Four convolutions, one in the stem and one a block; a block adds to its input in place."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(3)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(torch.relu(self.stem(x)))
        result: Tensor = self.head(hidden.mean((2, 3)))
        return result


class Cache(nn.Module):
    """Averages, a linear layer, softmax; the score is the largest probability."""

    def __init__(self, width: int = 8, gain: float = 3.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, CLASSES)
        self.gain = gain

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = (self.linear(hidden.mean((2, 3))) * self.gain).softmax(1)
        return probabilities, probabilities.amax(1)


class ConstantScore(Cache):
    """A cache whose score is the same for every input."""

    def __init__(self, score: float) -> None:
        super().__init__()
        self.score = score

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        probabilities, score = super().forward(hidden)
        return probabilities, torch.full_like(score, self.score)


def ready(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return ready(Network())


def traced_network(module: nn.Module | None = None) -> TracedModel:
    """The module as the runtime has it; the same one each time where none is given."""
    if module is not None:
        return trace(module, torch.randn(2, 1, 6, 6), BLOCKS)
    traced, afterwards = _traced_network()
    torch.set_rng_state(afterwards)
    return traced


@cache
def _traced_network() -> tuple[TracedModel, Tensor]:
    """Traced once, for that takes a third of a second; and the random state that this leaves behind."""
    return traced_network(network()), torch.get_rng_state()


def exits(
    thresholds: Sequence[float] = (0.5, 0.5, 0.5), placement: Placement = "inline", seed: int = 1
) -> list[EngineExit]:
    """One cache a block."""
    torch.manual_seed(seed)
    return [
        EngineExit(block, ready(Cache()), threshold, placement, "fake", 100)
        for block, threshold in zip(BLOCKS, thresholds, strict=True)
    ]


def selective_exits(traced: TracedModel, placement: Placement = "inline") -> list[EngineExit]:
    """One cache a block, each with the threshold that a third of the inputs still there reach."""
    chosen: list[EngineExit] = []
    remaining = inputs(300)
    with torch.inference_mode():
        for leaving in exits(placement=placement):
            scores = leaving.cache(traced.cut([leaving.block])[0].run(remaining)[0])[1]
            threshold = float(scores.quantile(2 / 3))
            chosen.append(replace(leaving, threshold=threshold))
            remaining = remaining[scores < threshold]
    return chosen


def moved(device: str, leaving: Sequence[EngineExit]) -> tuple[TracedModel, list[EngineExit]]:
    """The network of `traced_network` and copies of its exits, on another device."""
    traced = trace(network().to(device), inputs(2).to(device), BLOCKS)
    return traced, [replace(each, cache=deepcopy(each.cache).to(device)) for each in leaving]


def inputs(count: int, seed: int = 2) -> Tensor:
    """Inputs of very different size, so that caches are sure of some and unsure of others."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(count, 1, 1, 1, generator=generator) * 4.0
    return torch.randn(count, 1, 6, 6, generator=generator) * size
