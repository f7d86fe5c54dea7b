"""The network and its lookups as modules for single requests, for engines that compile graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gati.model.program import FlatFunction
from gati.model.segments import TracedModel

__all__ = ["Piece", "PieceModule", "pieces_of"]


class PieceModule(nn.Module):
    """A stretch of the network, with the lookup at its end inside the same graph where there is one."""

    def __init__(self, run: FlatFunction, cache: nn.Module | None = None) -> None:
        super().__init__()
        self.run = run
        self.cache = cache

    def forward(self, *carried: Tensor) -> Any:
        """Carried tensors in; carried tensors, then probabilities [1, K] and score [1] of the lookup, out."""
        # Copies, because a stretch may work in place on what it is given.
        handed_on = self.run(*(tensor.clone() for tensor in carried))
        if self.cache is None:
            return handed_on
        probabilities, score = self.cache(handed_on[0])
        return (*handed_on, probabilities, score)


class Piece(NamedTuple):
    """A module with an example of what it takes; `carries` of its outputs go to the next piece."""

    module: PieceModule
    example: tuple[Tensor, ...]
    carries: int


def pieces_of(traced: TracedModel, exits: Sequence[tuple[str, nn.Module | None]]) -> list[Piece]:
    """Cut at the blocks of `exits` (forward order), each with its cache or None; a last piece has neither."""
    pieces = []
    segments = traced.cut([block for block, _ in exits])
    carried: tuple[Tensor, ...] = (traced.example(),)
    with torch.inference_mode():
        for segment, (_, cache) in zip(segments, [*exits, ("", None)], strict=True):
            module = PieceModule(segment.run, cache).eval()
            pieces.append(Piece(module, tuple(map(_plain, carried)), len(segment.carried)))
            if segment.block is not None:
                carried = tuple(tensor.clone() for tensor in segment.run(*carried))
    return pieces


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous copy outside inference mode, as exporters want their examples."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
