"""A lower bound on exact compositions that respects one threshold per trial and one trial per block.

It is a Lagrangian relaxation. Write a composition as one choice per block (none, or a trial with a cut), and,
for every input, whether it arrives at each block and whether it continues. Arriving at block b equals
continuing from the block before. That equation gets a multiplier `worth[b]`, the assumed cost of an input
from its arrival at b on. Losses, slowdown and memory get prices. The rest separates into blocks: at each,
take the choice with the least sum over inputs of

    leaving: exit_ms + price of a loss if wrong - worth[b]      going on: penalty_ms + worth[b + 1] - worth[b]

An input whose term is positive need not arrive (at the first block all inputs do), and `worth` after the last
block is `base_ms`. The terms of all cuts of a trial are one cumulative sum, as in `search`. The sum of these
minima, plus `worth` at the first block, minus prices times limits, is a lower bound for every composition,
for any multipliers and any prices of at least zero (weak duality). So the proof does not depend on how they
are found. They are found by gradient ascent (Adam; Kingma and Ba 2015) on a smoothed minimum over choices,
with decreasing smoothing, because plain subgradients oscillate with this many ties. At the start every input
leaves at the first trial that is right for it, and no choice seems better than none: this is the oracle's
bound.

The relaxation ignores one lookup at a time, and that choices at different blocks must suit all inputs
together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gati.composition.instance import Bools, Floats, Instance
from gati.composition.problem import BYTES_PER_UNIT, SLACK_MS

STEPS = 400
WORK = 1e8  # most terms (trials x inputs x steps): five seconds on one core
STEP_MS = 1.4  # the first step, as a share of base_ms over the root of the blocks; the last is 1 % of it
COARSE, FINE = 0.02, 0.0005  # smoothing width, first and last: how much worse a choice may be and still count
FIRST_PRICE = 2.0  # of a loss, as a multiple of base_ms
SAFETY = 1e-9  # rounding of sums


@dataclass
class _Multipliers:
    """The multipliers of the relaxation; the slopes of its value have the same shape."""

    worth: Floats  # [blocks, n] of arriving at each block
    prices: Floats  # [3] of a loss, of a millisecond of slowdown, of memory


def priced_bound_ms(instance: Instance, budget: int, *, steps: int = STEPS) -> float:
    """Return a lower bound on the mean latency of compositions with at most `budget` disagreements."""
    if not instance.trials or not instance.inputs:
        return instance.base_ms
    relaxation = _Relaxation(instance, budget)
    steps = max(1, min(steps, int(WORK / instance.order.size)))
    best_ms = min(instance.base_ms, float((instance.reach_ms + instance.lookup_ms).min()))  # none is faster
    at, ascent = relaxation.start(), _Ascent(relaxation.scale)
    longest_ms = STEP_MS * instance.base_ms / len(at.worth) ** 0.5
    for step in range(steps):
        done = step / steps
        value_ms, slope = relaxation.value(at, COARSE * (FINE / COARSE) ** done)
        best_ms = max(best_ms, value_ms)
        ascent.move(at, slope, longest_ms * 0.01**done)
    return best_ms - SAFETY * abs(best_ms)


class _Relaxation:
    def __init__(self, instance: Instance, budget: int) -> None:
        self._instance = instance
        _, self._block = np.unique(instance.block, return_inverse=True)
        self._starts = np.flatnonzero(np.diff(self._block, prepend=-1))
        self._exit_ms = (instance.reach_ms + instance.lookup_ms)[:, None]
        self._penalty_ms = instance.penalty_ms[:, None]
        self._rank = np.empty_like(instance.order)
        positions = np.broadcast_to(np.arange(instance.inputs), instance.order.shape)
        np.put_along_axis(self._rank, instance.order, positions, axis=1)
        self._at_first = (self._block == 0)[:, None]
        # what each trial uses of the limited quantities except losses; without a limit, it is infinite
        memory = instance.memory_bytes / BYTES_PER_UNIT
        self._used = np.stack([instance.penalty_ms, memory])  # [2, m]
        slowest_ms, limit = instance.slowdown_limit_ms, instance.memory_limit_bytes
        self._limits = np.array(
            [
                float(budget),
                np.inf if slowest_ms is None else slowest_ms + SLACK_MS,
                np.inf if limit is None else limit / BYTES_PER_UNIT,
            ]
        )
        alone_too_much: Bools = np.any(self._used > self._limits[1:, None], axis=0)
        self._not_allowed = ~instance.may_cut | alone_too_much[:, None]

    @property
    def scale(self) -> Floats:
        """The step of each price relative to a step of 1 ms in `worth`."""
        limits = self._limits[1:]
        bounded = np.isfinite(limits) & (limits > 0.0)
        others = np.where(bounded, 0.01 * self._instance.inputs / np.where(bounded, limits, 1.0), 0.0)
        return np.concatenate([[1.0], others])

    def start(self) -> _Multipliers:
        instance = self._instance
        rightly_ms: Floats = np.where(instance.wrong, np.inf, self._exit_ms)
        by_block: Floats = np.minimum.reduceat(rightly_ms, self._starts, axis=0)
        from_here: Floats = np.minimum.accumulate(np.flip(by_block, axis=0), axis=0)
        prices = np.array([FIRST_PRICE * instance.base_ms, 0.0, 0.0])
        return _Multipliers(np.minimum(np.flip(from_here, axis=0), instance.base_ms), prices)

    def value(self, at: _Multipliers, width: float) -> tuple[float, _Multipliers]:
        """Return the bound as a mean latency, and the slope of its value smoothed over `width` of base_ms."""
        instance, block = self._instance, self._block
        here = at.worth
        further = np.vstack([here[1:], np.full((1, instance.inputs), instance.base_ms)])
        go_on = further - here  # [blocks, n] without an exit there
        free = go_on < 0.0
        free[0] = True
        without = np.where(free, go_on, 0.0).sum(axis=1)
        missed = go_on[block] + self._penalty_ms
        arrives_missed = (missed < 0.0) | self._at_first
        left = self._exit_ms + at.prices[0] * instance.wrong - here[block]
        arrives_left = (left < 0.0) | self._at_first
        missed, left = np.where(arrives_missed, missed, 0.0), np.where(arrives_left, left, 0.0)
        gained = np.take_along_axis(left - missed, instance.order, axis=1)
        sums = np.cumsum(gained, axis=1, out=gained) + missed.sum(axis=1)[:, None]
        sums[self._not_allowed] = np.inf
        cut = sums.argmin(axis=1)
        with_trial = sums[np.arange(len(cut)), cut] + at.prices[1:] @ self._used
        least = np.minimum(np.minimum.reduceat(with_trial, self._starts), without)
        charged = float(sum(p * limit for p, limit in zip(at.prices, self._limits, strict=True) if p > 0.0))
        value = float(here[0].sum() + least.sum()) - charged

        # choices that are nearly the best also count, with weights that decrease with their distance
        softness = width * instance.base_ms * instance.inputs
        weight = np.exp(-np.minimum((with_trial - least[block]) / softness, 60.0))
        weight_without = np.exp(-np.minimum((without - least) / softness, 60.0))
        total = np.add.reduceat(weight, self._starts) + weight_without
        weight, weight_without = weight / total[block], weight_without / total
        hit = self._rank <= cut[:, None]
        going_on = np.where(hit, False, arrives_missed) * weight[:, None]
        leaving = (hit & arrives_left) * weight[:, None]
        kept = weight_without[:, None] * free
        goes_on = np.add.reduceat(going_on, self._starts, axis=0) + kept
        arrives = goes_on + np.add.reduceat(leaving, self._starts, axis=0)
        slope = np.zeros_like(here)
        slope[1:] = goes_on[:-1] - arrives[1:]
        used = np.array([float((leaving * instance.wrong).sum()), *(self._used @ weight)])
        excess = np.where(np.isfinite(self._limits), used - self._limits, 0.0)
        return value / instance.inputs, _Multipliers(slope, excess)


class _Ascent:
    """Gradient ascent with Adam; prices stay at zero or more."""

    def __init__(self, scale: NDArray[np.float64], fast: float = 0.9, slow: float = 0.99) -> None:
        self._scale = scale
        self._rates = fast, slow
        self._steps = 0
        self._mean: _Multipliers | None = None
        self._square: _Multipliers | None = None

    def move(self, at: _Multipliers, slope: _Multipliers, length: float) -> None:
        """Change each number of `at` in place by about `length`."""
        fast, slow = self._rates
        if self._mean is None or self._square is None:
            self._mean = _Multipliers(np.zeros_like(slope.worth), np.zeros_like(slope.prices))
            self._square = _Multipliers(np.zeros_like(slope.worth), np.zeros_like(slope.prices))
        self._steps += 1
        moved = []
        for name in ("worth", "prices"):
            mean, square, new = (getattr(each, name) for each in (self._mean, self._square, slope))
            mean += (1.0 - fast) * (new - mean)
            square += (1.0 - slow) * (new * new - square)
            deviation = np.sqrt(square / (1.0 - slow**self._steps)) + 1e-3
            moved.append(length * mean / (1.0 - fast**self._steps) / deviation)
        at.worth += moved[0]
        at.prices = np.maximum(0.0, at.prices + self._scale * moved[1])
