"""Counts and histograms with exponential decay: entries count half as much after each half-life.

Time is any increasing number, here the number of queries; there is no clock. An entry at time `at` has the
weight 2^(at / half_life), relative to a landmark that moves forward now and then. So adding takes constant
time, and old entries need no update (forward decay). Entries may be added in any order, and objects merged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable
from typing import Generic, Self, TypeVar

from gati.errors import PipelineError
from gati.pipelines.distribution import Distribution

_LARGEST_EXPONENT = 25.0  # the landmark moves beyond it: e^25 is 7e10
_FORGOTTEN = 1e-12  # weight relative to a current query
_LEAST_MS = 1e-3
_LARGEST_MS = 1e7
_WIDTH = math.log(1.03)  # of a bin, on the logarithmic scale
_LAST_BIN = math.ceil(math.log(_LARGEST_MS / _LEAST_MS) / _WIDTH)

_Key = TypeVar("_Key", bound=Hashable)


class DecayedCounts(Generic[_Key]):
    """Decayed counts of keys. Not thread-safe.

    **Raises:** `PipelineError` for a half-life that is not positive.
    """

    def __init__(self, half_life: float) -> None:
        if not half_life > 0.0:
            raise PipelineError(f"half_life is {half_life}; give a number above zero")
        self.half_life = half_life
        self._rate = math.log(2.0) / half_life
        self._landmark = 0.0
        self._weights: dict[_Key, float] = {}

    def add(self, key: _Key, at: float, weight: float = 1.0) -> None:
        """Count `key` at time `at`."""
        worth = weight * self._worth(at)
        self._weights[key] = self._weights.get(key, 0.0) + worth

    def mass(self, at: float) -> float:
        """The total weight at time `at`."""
        return sum(self._weights.values()) * self._left(at)

    def count(self, key: _Key, at: float) -> float:
        """The weight of `key` at time `at`."""
        return self._weights.get(key, 0.0) * self._left(at)

    def shares(self) -> dict[_Key, float]:
        """The share of each key; empty without keys. Independent of time, as all keys decay equally."""
        total = sum(self._weights.values())
        return {key: weight / total for key, weight in self._weights.items()} if total > 0.0 else {}

    def copy(self) -> Self:
        """An independent copy."""
        found = copy.copy(self)
        found._weights = dict(self._weights)
        return found

    def merge(self, other: Self) -> None:
        """Add counts with the same time axis. Raises `PipelineError` if the half-lives differ."""
        factor = self._factor_of(other)
        for key, weight in other._weights.items():
            self._weights[key] = self._weights.get(key, 0.0) + factor * weight

    # ----------------------------------------------------------------------------------------------------

    def _worth(self, at: float) -> float:
        exponent = (at - self._landmark) * self._rate
        if exponent > _LARGEST_EXPONENT:
            self._move(at)
            exponent = 0.0
        return math.exp(exponent)

    def _left(self, at: float) -> float:
        """The factor that converts a stored weight to its weight at time `at`."""
        return math.exp(min((self._landmark - at) * self._rate, _LARGEST_EXPONENT))

    def _move(self, landmark: float) -> None:
        factor = math.exp((self._landmark - landmark) * self._rate)
        self._scale(factor)
        self._landmark = landmark

    def _scale(self, factor: float) -> None:
        scaled = {key: weight * factor for key, weight in self._weights.items()}
        self._weights = {key: weight for key, weight in scaled.items() if weight > _FORGOTTEN}

    def _factor_of(self, other: Self) -> float:
        """The factor that converts weights of `other` to this object's landmark."""
        if other.half_life != self.half_life:
            raise PipelineError(
                f"half-lives {self.half_life} and {other.half_life} differ; merge only equal half-lives"
            )
        if other._landmark > self._landmark:
            self._move(other._landmark)
        return math.exp((other._landmark - self._landmark) * self._rate)


class DecayedHistogram(DecayedCounts[int]):
    """Recent latencies, in at most 780 bins, each 3 % wide. Not thread-safe.

    Each bin stores the mean of its values, so means are exact and quantiles within 3 %. All values below
    0.001 ms share a bin.
    """

    def __init__(self, half_life: float) -> None:
        super().__init__(half_life)
        self._sums: dict[int, float] = {}

    def observe(self, value_ms: float, at: float, weight: float = 1.0) -> None:
        """Add a value of at least zero."""
        key = 0
        if value_ms > _LEAST_MS:
            key = min(1 + int(math.log(value_ms / _LEAST_MS) / _WIDTH), _LAST_BIN)
        worth = weight * self._worth(at)
        self._weights[key] = self._weights.get(key, 0.0) + worth
        self._sums[key] = self._sums.get(key, 0.0) + worth * value_ms

    def mean_ms(self) -> float | None:
        """The decayed mean, None without values."""
        total = sum(self._weights.values())
        return sum(self._sums.values()) / total if total > 0.0 else None

    def distribution(self) -> Distribution | None:
        """The distribution, with one atom per bin; None without values."""
        shares = {key: share for key, share in sorted(self.shares().items()) if share > 0.0}
        if not shares:
            return None
        values = tuple(self._sums[key] / self._weights[key] for key in shares)
        return Distribution(values, tuple(shares.values()))

    def copy(self) -> Self:
        """An independent copy."""
        found = super().copy()
        found._sums = dict(self._sums)
        return found

    def merge(self, other: Self) -> None:
        """Add a histogram with the same time axis. Raises `PipelineError` if the half-lives differ."""
        factor = self._factor_of(other)
        super().merge(other)
        for key, value in other._sums.items():
            self._sums[key] = self._sums.get(key, 0.0) + factor * value

    def _scale(self, factor: float) -> None:
        super()._scale(factor)
        self._sums = {key: self._sums[key] * factor for key in self._weights}
