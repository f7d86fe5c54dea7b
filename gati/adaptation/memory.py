"""Earlier answers of the base model at a place, and how similar an input is to earlier inputs there.

A *place* is whatever shows one thing over time: a camera, or a region of its pictures. Inputs are compared by
a sketch of at most 8 x 8 means per channel: the class matters, not the pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gati.engine.exits import Prediction

NEAREST = 5  # number of nearest remembered inputs to compare with
FURTHER = NEAREST  # the first features grow with uncertainty (distances); the others fall
FEATURES = 3 * NEAREST + 1

MemoryContents = tuple[NDArray[np.float32], Sequence[Prediction], NDArray[np.int64]]

_GRID = 8
_CAPACITY = 128  # inputs remembered per place
_MOST_EVIDENCE = 12.0  # log odds; float32 softmax is not meaningful beyond
_CLEAR = 3.0  # log odds above which noise hardly changes the class
_BLUR = 0.01  # added to distances, in units of the network's input


class Seen(NamedTuple):
    """The `answer` to the nearest remembered input, and `features` [FEATURES] of its reliability.

    `scene` is the number that the nearest input was remembered with.
    """

    features: NDArray[np.float64]
    answer: Prediction
    scene: int = 0

    @property
    def distance(self) -> float:
        """The log RMS distance of the nearest remembered input."""
        return float(self.features[0])


class Memory:
    """The last inputs of one place that the base model answered."""

    def __init__(self, size: int) -> None:
        self._sketches = np.empty((_CAPACITY, size), dtype=np.float32)
        self._squared = np.empty(_CAPACITY, dtype=np.float32)
        self._known: list[tuple[int, float, Prediction, int]] = []  # class, evidence, answer, scene
        self._newest = -1

    def __len__(self) -> int:
        return len(self._known)

    @property
    def newest_scene(self) -> int:
        """The scene of the input remembered last."""
        return self._known[self._newest][3] if self._known else 0

    def add(self, sketched: NDArray[np.float32], answer: Prediction, scene: int = 0) -> None:
        """Remember the base model's answer to an input of that scene, replacing the oldest one when full."""
        at = self._newest = (self._newest + 1) % _CAPACITY
        self._sketches[at] = sketched
        self._squared[at] = sketched @ sketched
        self._known[at : at + 1] = [(answer.class_index, evidence_of(answer), answer, scene)]

    def contents(self) -> MemoryContents:
        """The remembered sketches [n, size], oldest first, with their answers and scenes [n]."""
        first = 0 if len(self) < _CAPACITY else self._newest + 1
        order = [(first + at) % len(self) for at in range(len(self))]
        scenes = np.array([self._known[at][3] for at in order], dtype=np.int64)
        return self._sketches[order], [self._known[at][2] for at in order], scenes

    def recall(self, sketched: NDArray[np.float32]) -> Seen | None:
        """The answer to the most similar input; None if too few are remembered.

        Features: the log RMS distances of the nearest inputs, the evidence of each for the class of the
        nearest (negative if its own class differs), whether each has that class, whether the newest has it,
        and how clear the nearest was.
        """
        count = len(self._known)
        if count < NEAREST:
            return None
        squared = self._squared[:count] - 2.0 * (self._sketches[:count] @ sketched)
        nearest = np.argpartition(squared, NEAREST - 1)[:NEAREST].tolist()
        own = float(sketched @ sketched)
        apart = sorted((max(float(squared[at]) + own, 0.0), at) for at in nearest)
        known = [self._known[at] for _, at in apart]
        wanted, evidence, answer, scene = known[0]
        alike = [1.0 if each[0] == wanted else -1.0 for each in known]
        features = [math.log(math.sqrt(distance / len(sketched)) + _BLUR) for distance, _ in apart]
        features += [each[1] * sign for each, sign in zip(known, alike, strict=True)]
        features += alike[1:]
        features.append(1.0 if self._known[self._newest][0] == wanted else 0.0)
        features.append(min(evidence, _CLEAR))
        return Seen(np.array(features), answer, scene)


class Memories:
    """A memory for each of at most `most` places; the one unused for longest is forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[str, Memory] = {}  # most recently used last
        self.forgotten = 0  # places

    def __len__(self) -> int:
        return len(self._of)

    def used(self, place: str) -> Memory | None:
        """The memory of a place, which is used now; None if there is none."""
        memory = self._of.pop(place, None)
        if memory is not None:
            self._of[place] = memory
        return memory

    def add(self, place: str, sketched: NDArray[np.float32], answer: Prediction, scene: int) -> str | None:
        """Remember the base model's answer to an input; returns the place that is forgotten for it."""
        forgotten = None
        if place not in self._of:
            if len(self._of) >= self._most:
                forgotten = next(iter(self._of))
                del self._of[forgotten]
                self.forgotten += 1
            self._of[place] = Memory(len(sketched))
        self._of[place].add(sketched, answer, scene)
        return forgotten

    @property
    def newest_scenes(self) -> dict[str, int]:
        """The scene of the input that each place has shown last."""
        return {place: memory.newest_scene for place, memory in self._of.items()}

    def contents(self) -> dict[str, MemoryContents]:
        """What is remembered of each place, as `Memory.contents`."""
        return {place: memory.contents() for place, memory in self._of.items()}

    def filled(self, contents: Mapping[str, MemoryContents]) -> Memories:
        """New ones with such contents, of the places used last. Raises TypeError or ValueError if damaged."""
        made = Memories(self._most)
        for place, (sketches, answers, scenes) in contents.items():
            memory = Memory(sketches.shape[1])
            for sketched, answer, scene in zip(sketches, answers, scenes.tolist(), strict=True):
                memory.add(sketched, answer, scene)
            made._of[place] = memory
        made._of = dict(list(made._of.items())[-self._most :])
        return made


class LastShown:
    """What places showed last: at most `limit`, more than are remembered, as clients choose their names."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._shown: dict[str, int] = {}  # hashes of sketches; most recent last

    def again(self, place: str, sketched: NDArray[np.float32]) -> bool:
        """Record what a place shows now; returns whether it showed exactly that just before."""
        before, now = self._shown.pop(place, None), hash(sketched.tobytes())
        self._shown[place] = now
        if len(self._shown) > self._limit:
            del self._shown[next(iter(self._shown))]
        return before == now


class FeatureRows:
    """The last `limit` features, with labels and scenes; the order is lost."""

    def __init__(self, limit: int) -> None:
        self._features = np.empty((limit, FEATURES))
        self._labels = np.zeros(limit, dtype=np.bool_)
        self._scenes = np.zeros(limit, dtype=np.int64)
        self._taken = 0

    def __len__(self) -> int:
        return min(self._taken, len(self._features))

    def add(self, features: NDArray[np.float64], label: bool = False, scene: int = 0) -> None:
        """Add a row, in place of the oldest one if there is no room."""
        at = self._taken % len(self._features)
        self._features[at], self._labels[at], self._scenes[at] = features, label, scene
        self._taken += 1

    def all(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
        """All rows: features [n, FEATURES], labels [n] and scenes [n]."""
        count = len(self)
        return self._features[:count].copy(), self._labels[:count].copy(), self._scenes[:count].copy()


def sketch(x: Tensor) -> NDArray[np.float32]:
    """An input [1, ...] as means over at most 8 x 8 fields of each channel."""
    x = x.detach()
    if x.dim() == 4:
        height, width = x.shape[2:]
        x = functional.adaptive_avg_pool2d(x, (min(height, _GRID), min(width, _GRID)))
    else:
        length = x[0].numel()
        x = functional.adaptive_avg_pool1d(x.reshape(1, 1, length), min(length, 3 * _GRID * _GRID))
    return x.float().reshape(-1).numpy()


def evidence_of(answer: Prediction) -> float:
    """Log odds of the base model's class against its second choice."""
    if len(answer.probabilities) < 2:
        return _MOST_EVIDENCE
    first, second = torch.topk(answer.probabilities.float(), 2).values.tolist()
    return min(math.log(first + 1e-9) - math.log(second + 1e-9), _MOST_EVIDENCE)
