"""Samples: the features of blocks when they were requested, and when they were requested again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.evict.predict.history import FEATURES, Observer

Floats = NDArray[np.float64]
_BLOCKS = FEATURES.index("blocks")


def next_fit(samples: int, growth: float, longest_step: int) -> int:
    """The number of samples at the next fit after one at `samples`: `growth` times as many, or fewer."""
    return min(int(samples * growth), samples + longest_step)


class Labels(NamedTuple):
    """Features of all samples at one moment, [n] each.

    `gaps_s` is the time until the next request, NaN if none has come; `watched_s` is the time that the sample
    was observed; `weights` grow with the number of blocks.
    """

    features: NDArray[np.float32]  # [n, F]
    gaps_s: Floats
    watched_s: Floats
    weights: Floats


class ReuseSamples(Observer):
    """The latest `window` samples; older ones are dropped, and their numbers ignored."""

    def __init__(self, window: int) -> None:
        self.taken_in_all = 0
        self._window = window
        self._features = np.zeros((window, len(FEATURES)), dtype=np.float32)
        self._taken_s = np.zeros(window)
        self._gap_s = np.full(window, np.nan)
        self._lost_s = np.full(window, np.inf)  # when it was forgotten

    def taken(self, rows: NDArray[np.float32], now_s: float) -> Sequence[int]:
        """Store samples in place of the oldest."""
        first = self.taken_in_all
        at = first % self._window
        if at + len(rows) <= self._window:
            self._fill(slice(at, at + len(rows)), rows, now_s)
        else:
            for number, row in enumerate(rows, first):
                at = number % self._window
                self._fill(slice(at, at + 1), row, now_s)
        self.taken_in_all = first + len(rows)
        return range(first, self.taken_in_all)

    def copied(self, sample: int) -> int:
        """Store a copy of a sample."""
        if not self._has(sample):
            return -1
        source, at = sample % self._window, self.taken_in_all % self._window
        self._fill(slice(at, at + 1), self._features[source], float(self._taken_s[source]))
        self.taken_in_all += 1
        return self.taken_in_all - 1

    def returned(self, sample: int, now_s: float) -> None:
        """The blocks of the sample are requested again now."""
        if self._has(sample):
            self._gap_s[sample % self._window] = now_s - self._taken_s[sample % self._window]

    def forgotten(self, sample: int, now_s: float) -> None:
        """The sample is no longer observed."""
        if self._has(sample):
            self._lost_s[sample % self._window] = now_s

    def labels(self, now_s: float | Floats) -> Labels:
        """Copies of all labels known at `now_s`, a time for all samples or one for each, [n]."""
        count = min(self.taken_in_all, self._window)
        features = self._features[:count].copy()
        watched = np.minimum(self._lost_s[:count], now_s) - self._taken_s[:count]
        return Labels(
            features, self._gap_s[:count].copy(), watched, np.sqrt(features[:, _BLOCKS]).astype(float)
        )

    def _fill(self, at: slice, features: NDArray[np.float32], taken_s: float) -> None:
        self._features[at] = features
        self._taken_s[at], self._gap_s[at], self._lost_s[at] = taken_s, np.nan, np.inf

    def _has(self, sample: int) -> bool:
        return sample >= 0 and sample >= self.taken_in_all - self._window


class Rows(NamedTuple):
    """One row per sample and age bin: sample, number of the bin, whether it returned there, weight."""

    sample: NDArray[np.int64]
    number: NDArray[np.int64]
    returned: NDArray[np.bool_]
    weights: Floats


def by_bin(labels: Labels, edges: Floats) -> Rows:
    """One row for each sample and age bin during which it was observed, at least in part.

    If observation ended within a bin without a return, the row's weight is the observed share of the bin (the
    actuarial exposure). Without these rows, bins that few samples were observed through would show returns
    only.
    """
    bins = len(edges) - 1
    returned = ~np.isnan(labels.gaps_s)
    until = np.where(returned, labels.gaps_s, labels.watched_s)
    at = np.clip(np.searchsorted(edges, until, side="right") - 1, 0, bins)
    rows = np.minimum(at + 1, bins)
    sample = np.repeat(np.arange(len(until)), rows)
    number = np.arange(len(sample)) - np.repeat(np.cumsum(rows) - rows, rows)
    ended = number == at[sample]
    share = (until[sample] - edges[number]) / (edges[number + 1] - edges[number])
    weights = labels.weights[sample] * np.where(ended & ~returned[sample], share, 1.0)
    counts = weights > 0.0
    return Rows(sample[counts], number[counts], (returned[sample] & ended)[counts], weights[counts])
