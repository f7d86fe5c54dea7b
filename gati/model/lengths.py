"""Sequences of varying length: each input is executed at the shortest of a few lengths that fits its tokens.

Inputs arrive padded to the longest length. The mask gives the true length of each. Before execution an input
is cut to the shortest length that fits, however far the client padded it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor, nn

from gati.model.inputs import TensorInputs
from gati.model.masks import MASK
from gati.model.preprocess import Preprocessing
from gati.model.segments import TracedModel, trace
from gati.model.sequence import Data
from gati.model.text import bucket_lengths

_ROWS = 4096  # inputs of the data that are read at a time
_TOLERANCE = 1e-4  # largest effect of padding on a score, relative to the range of the scores
_SMALL = 0.05  # lengths that take a smaller share of the time are not measured separately


class Lengths:
    """The lengths at which packed inputs [B, arrays, longest] are executed, with the share of each."""

    def __init__(self, tensors: TensorInputs, shares: Sequence[tuple[int, float]]) -> None:
        self.shares = tuple(shares)
        self.every = tuple(length for length, _ in self.shares)  # ascending
        self._tensors = tensors
        self._mask = next(place for place, part in enumerate(tensors.parts) if part.name == MASK)

    def of(self, x: Tensor) -> list[int]:
        """The shortest length that holds all tokens, for each row of [B, arrays, longest]."""
        tokens = x[:, self._mask].cpu().numpy() != 0
        last = np.where(tokens.any(1), tokens.shape[1] - tokens[:, ::-1].argmax(1), 0)
        return [self.every[place] for place in np.searchsorted(self.every, last)]

    def example(self, length: int, rows: int = 1) -> Tensor:
        """Packed inputs [rows, arrays, longest] of `length` tokens, with random ids; the rest is padding."""
        x = self._tensors.example(rows)
        x[:, self._mask] = 1
        x[..., length:] = 0
        return x

    def padded(self, x: Tensor) -> Tensor:
        """Pad inputs [B, arrays, length] to the longest length; other shapes are returned unchanged."""
        longest = self.every[-1]
        if x.ndim != 3 or not 0 < x.shape[2] < longest:
            return x
        return nn.functional.pad(x, (0, longest - x.shape[2]))


@dataclass(frozen=True)
class TracedSequences(TracedModel):
    """A network traced at the longest length, and at other lengths on demand."""

    lengths: Lengths | None = None
    retrace: Callable[[int], TracedModel] | None = field(default=None, repr=False)
    _known: dict[int, TracedModel] = field(default_factory=dict, repr=False)
    _tracing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def at(self, length: int) -> TracedModel:
        """The network for inputs [B, arrays, length]."""
        if self.retrace is None or length == self.input_shape[-1]:
            return self
        with self._tracing, self.alone():  # tracing runs the network
            if length not in self._known:
                self._known[length] = self.retrace(length)
            return self._known[length]


def with_lengths(
    traced: TracedModel, module: nn.Module, example: Tensor, preprocessing: Preprocessing
) -> TracedModel:
    """Add tracing on demand, at the lengths of `preprocessing`, to a network that was traced on `example`."""
    tensors = preprocessing.tensors
    if tensors is None or not preprocessing.lengths:
        return traced
    known = {each.name: getattr(traced, each.name) for each in fields(TracedModel)}
    return TracedSequences(
        **known,
        lengths=Lengths(tensors, preprocessing.lengths),
        retrace=lambda length: trace(module, example[..., :length].contiguous(), traced.blocks),
    )


def at_lengths(traced: TracedModel) -> tuple[tuple[float, TracedModel], ...]:
    """The network at each length that takes a significant part of the time, with its share of the inputs.

    The shares sum to 1: rare lengths count with the next longer one, or else with the longest.
    """
    if not isinstance(traced, TracedSequences) or traced.lengths is None:
        return ((1.0, traced),)
    shares = dict(traced.lengths.shares)
    total = sum(length * share for length, share in shares.items())
    kept = [length for length, share in shares.items() if length * share >= _SMALL * total]
    counted = dict.fromkeys(kept, 0.0)
    for length, share in shares.items():
        counted[next((each for each in kept if each >= length), kept[-1])] += share
    return tuple((share, traced.at(length)) for length, share in counted.items())


@torch.inference_mode()
def length_shares(module: nn.Module, tensors: TensorInputs, data: Data) -> tuple[tuple[int, float], ...]:
    """The lengths at which `module` can be executed, with the share of `data` at each.

    Empty for inputs without a mask, for short inputs, and for a network whose scores depend on padding.
    """
    shapes = {part.shape for part in tensors.parts}
    if tensors.alone or len(shapes) > 1 or not any(part.name == MASK for part in tensors.parts):
        return ()
    (shape,) = shapes
    every = bucket_lengths(shape[0]) if len(shape) == 1 else ()
    if len(every) < 2:
        return ()
    lengths = Lengths(tensors, [(length, 0.0) for length in every])
    if not all(_ignores_padding(module, lengths.example(length, 2), length) for length in every[:-1]):
        return ()
    counts = dict.fromkeys(every, 0)
    for start in range(0, len(data), _ROWS):
        for length in lengths.of(data.images(range(start, min(start + _ROWS, len(data))))):
            counts[length] += 1
    return tuple((length, count / len(data)) for length, count in counts.items())


def _ignores_padding(module: nn.Module, x: Tensor, length: int) -> bool:
    try:
        padded, own = module(x.clone()), module(x[..., :length].contiguous())
    except Exception:  # a network of fixed length may raise anything
        return False
    if not (isinstance(own, Tensor) and own.shape == padded.shape):
        return False
    score_range = padded.amax(-1) - padded.amin(-1)
    return bool(((own - padded).abs().amax(-1) <= _TOLERANCE * score_range).all())
