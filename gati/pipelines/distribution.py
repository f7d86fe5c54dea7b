"""A measured latency as a distribution, because requests leave a network at different exits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gati.errors import PipelineError

_MOST_SUMS = 512  # maximum number of distinct sums of two distributions
_FINENESS = 0.005  # with more sums, those within this step of the logarithm are merged


@dataclass(frozen=True)
class Distribution:
    """The latency of a request as atoms: it is `values_ms[i]` with probability `probabilities[i]`.

    Values are sorted and non-negative, probabilities sum to 1. Make one with `from_samples` or `constant`.
    """

    values_ms: tuple[float, ...]
    probabilities: tuple[float, ...]

    @classmethod
    def from_samples(cls, samples_ms: Sequence[float] | npt.NDArray[np.float64]) -> Distribution:
        """The empirical distribution of measured latencies, with equal weights.

        **Raises:** `PipelineError` without samples, or for one that is not a finite positive number.
        """
        samples = np.asarray(samples_ms, dtype=np.float64)
        if samples.ndim != 1 or samples.size == 0:
            raise PipelineError("a latency distribution needs at least one measured latency; measure again")
        wrong = samples[~(np.isfinite(samples) & (samples > 0.0))]
        if wrong.size:
            raise PipelineError(f"latency {wrong[0]:g} ms is not a number above zero; measure again")
        values, counts = np.unique(samples, return_counts=True)
        return cls(tuple(values.tolist()), tuple((counts / samples.size).tolist()))

    @classmethod
    def constant(cls, latency_ms: float) -> Distribution:
        """A constant latency. Raises `PipelineError` as `from_samples` does."""
        return cls.from_samples([latency_ms])

    def mixed(self, other: Distribution, share: float) -> Distribution:
        """The mixture with `other`, where `other` has the weight `share`."""
        if share <= 0.0:
            return self
        if share >= 1.0:
            return other
        values = np.concatenate([self.values_ms, other.values_ms])
        weights = np.concatenate(
            [(1.0 - share) * np.asarray(self.probabilities), share * np.asarray(other.probabilities)]
        )
        order = np.argsort(values, kind="stable")
        return Distribution(tuple(values[order].tolist()), tuple(weights[order].tolist()))

    def plus(self, other: Distribution) -> Distribution:
        """The distribution of the sum of two independent latencies.

        If there are many sums, those within half a percent are merged; the mean stays exact.
        """
        values = np.add.outer(self.values_ms, other.values_ms).ravel()
        weights = np.multiply.outer(self.probabilities, other.probabilities).ravel()
        if values.size > _MOST_SUMS:
            cells = np.floor(np.log(np.maximum(values, 1e-3)) / _FINENESS).astype(np.int64)
            cells -= cells.min()
            together = np.bincount(cells, weights)
            kept = np.flatnonzero(together)
            values = np.bincount(cells, weights * values)[kept] / together[kept]
            weights = together[kept]
        order = np.argsort(values, kind="stable")
        return Distribution(tuple(values[order].tolist()), tuple(weights[order].tolist()))

    @cached_property
    def mean_ms(self) -> float:
        """The expected latency."""
        return float(np.dot(self.values_ms, self.probabilities))

    def reaches(self, latency_ms: float) -> float:
        """The probability that a request takes no longer than this."""
        within = np.searchsorted(self.values_ms, latency_ms, side="right")
        return float(sum(self.probabilities[: int(within)]))

    def quantile_ms(self, probability: float) -> float:
        """The smallest atom that a latency does not exceed with at least this probability."""
        # 1e-9: probabilities are sums of fractions, and 0.95 must find the 95th of 100 samples
        reached = np.searchsorted(np.cumsum(self.probabilities), probability - 1e-9)
        return self.values_ms[min(int(reached), len(self.values_ms) - 1)]
