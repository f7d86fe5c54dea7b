"""A quantile of a stream of values, estimated without storing them."""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 0.98  # weight of earlier values in the scale
_STEP = 0.3  # in units of the scale


@dataclass
class RunningQuantile:
    """The `share` quantile of recent values, by stochastic descent on the pinball loss (Robbins, Monro 1951).

    Each value above the estimate raises it by `share` of a step; any other lowers it by the rest. A step is a
    fraction of the average distance between values and estimate, so the estimate follows a changing load and
    settles on a steady one.
    """

    share: float
    value: float = 0.0
    _scale: float = 0.0
    _count: int = 0

    def add(self, value: float) -> None:
        """Add a value."""
        self._count += 1
        if self._count == 1:
            self.value = value
        memory = min(_MEMORY, 1.0 - 1.0 / self._count)
        self._scale = memory * self._scale + (1.0 - memory) * abs(value - self.value)
        step = _STEP * self._scale
        self.value += step * (self.share if value > self.value else self.share - 1.0)

    def shrink(self, factor: float) -> None:
        """Multiply it by a factor below 1, because a high estimate may itself be why no more values come."""
        self.value *= factor
