"""Predictors that know the future, to measure the gain of perfect predictions and the cost of errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.evict.predict.base import grown
from gati.evict.trace.future import next_uses
from gati.evict.trace.records import Trace

Floats = NDArray[np.float64]
NEVER = 1e15  # above any request number; finite, so that errors can be added


class Oracle:
    """Predicts how many requests later one contains a block; about NEVER if there is none."""

    def __init__(self, trace: Trace, *, seed: int = 0) -> None:
        self._after = np.minimum(next_uses(trace), NEVER)
        self._starts = trace.starts
        self._flat = trace.kind == "flat"
        self._random = np.random.default_rng(seed)
        self._now = np.zeros(0)  # next use of each section of this request
        self._kept = np.zeros(64)
        self._request = 0

    def observe(self, ids: list[int], request: int, time_s: float) -> list[int]:
        """Sections of a path are blocks of equal next use; in a flat trace, each block is its own section."""
        self._request = request
        begin = int(self._starts[request])
        after = self._after[begin : begin + len(ids)]
        if self._flat:
            ends = np.arange(1, len(ids) + 1)
        else:  # none for a request without blocks
            ends = np.append(np.flatnonzero(after[1:] != after[:-1]) + 1, len(ids))[: len(ids)]
        self._now = self._said(after[ends - 1])
        return [int(end) for end in ends]

    def assign(self, slot: int, stretch: int) -> None:
        """Store the prediction of the section."""
        if slot >= len(self._kept):
            self._kept = grown(self._kept, slot + 1)
        self._kept[slot] = self._now[stretch]

    def copy(self, source: int, target: int) -> None:
        """Both parts get the prediction of the whole run."""
        self._kept = grown(self._kept, target + 1)
        self._kept[target] = self._kept[source]

    def scores(self, count: int) -> Floats:
        """Requests until the predicted next uses, [count]."""
        self._kept = grown(self._kept, count)
        return self._kept[:count] - self._request

    def figures(self) -> Mapping[str, Any]:
        """Empty: an oracle has no counts."""
        return {}

    def _said(self, truth: Floats) -> Floats:
        return truth


class Noisy(Oracle):
    """With probability `share`, a prediction is the negated true next use, so the furthest looks nearest."""

    def __init__(self, trace: Trace, share: float, *, seed: int = 0) -> None:
        super().__init__(trace, seed=seed)
        self._share = share

    def _said(self, truth: Floats) -> Floats:
        return np.where(self._random.random(len(truth)) < self._share, -truth, truth)


class Lognormal(Oracle):
    """Multiplies the time until the next use by lognormal noise of scale `sigma`."""

    def __init__(self, trace: Trace, sigma: float, *, seed: int = 0) -> None:
        super().__init__(trace, seed=seed)
        self._sigma = sigma

    def _said(self, truth: Floats) -> Floats:
        factor = np.exp(self._sigma * self._random.standard_normal(len(truth)))
        return self._request + (truth - self._request) * factor
