"""A quantile that follows a stream of values without keeping them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RunningQuantile"]

_MEMORY = 0.98  # of the scale
_STEP = 0.3  # in units of the scale


@dataclass
class RunningQuantile:
    """The `share` quantile of late, by stochastic steps on the pinball loss (Robbins and Monro 1951).

    Each value above it lifts it by `share` of a step, each below lowers it by the rest; a step is a part of
    how far values are usually from it, so it follows a changed load and settles on a steady one.
    """

    share: float
    value: float = 0.0
    _scale: float = 0.0
    _count: int = 0

    def add(self, value: float) -> None:
        """Take in a value."""
        self._count += 1
        if self._count == 1:
            self.value = value
        memory = min(_MEMORY, 1.0 - 1.0 / self._count)
        self._scale = memory * self._scale + (1.0 - memory) * abs(value - self.value)
        step = _STEP * self._scale
        self.value += step * (self.share if value > self.value else self.share - 1.0)

    def shrink(self, factor: float) -> None:
        """Forget a part of it: where no values come because of what it is."""
        self.value *= factor
