"""A lower bound on the latency of any composition within a disagreement budget.

An oracle that lets each input leave at its first correct trial gives a bound, but a very loose one: a trial
cannot pick single inputs, it takes all inputs that score above its threshold. So, for each possible block of
the first exit:

1. If a trial at block i takes an input, it takes all inputs with higher scores, so all of these have left by
   block i. Those that this trial answers wrongly, and that no trial before i can take correctly, are certain
   disagreements. The threshold can only fall while the certain disagreements stay within the budget.
2. Fewer trials can then take an input early and correctly, so more disagreements are certain: repeat.
3. Each input leaves no earlier than the first trial that can take it correctly, except for at most `budget`
   inputs that leave wrongly, and the first exit takes exactly the inputs above its threshold.

The bound ignores some constraints, which makes it lower but never invalid: one trial per block and one
threshold per trial for all inputs, the penalties of all exits but the first, memory, and one lookup at a
time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gati.composition.instance import Floats, Instance

ROUNDS = 12


def lower_bound_ms(instance: Instance, budget: int) -> float:
    """Return a lower bound on the mean latency of compositions with at most `budget` disagreements."""
    best = instance.base_ms  # no exits
    in_order = np.take_along_axis(instance.wrong, instance.order, axis=1)
    for block in np.unique(instance.block):
        best = min(best, _with_first_exit_at(instance, in_order, int(block), budget))
    return best


def _with_first_exit_at(instance: Instance, in_order: NDArray[np.bool_], block: int, budget: int) -> float:
    depth = _deepest_cuts(instance, in_order, block, budget)
    later = np.flatnonzero(instance.block > block)
    right_ms, any_ms = _earliest(instance, in_order, depth, later)
    wrongly_saved = np.sort(right_ms - any_ms)[::-1][:budget].sum()
    first = np.flatnonzero(instance.block == block)
    order = instance.order[first]
    exit_ms = (instance.reach_ms + instance.lookup_ms)[first, None]
    penalty_ms = instance.penalty_ms[first, None]
    going_on = right_ms.sum() + penalty_ms * instance.inputs
    total = going_on + np.cumsum(exit_ms - right_ms[order] - penalty_ms, axis=1) - wrongly_saved
    possible = instance.may_cut[first] & (np.cumsum(in_order[first], axis=1) <= budget)
    return float(np.where(possible, total, np.inf).min()) / instance.inputs


def _deepest_cuts(
    instance: Instance, in_order: NDArray[np.bool_], block: int, budget: int
) -> NDArray[np.int64]:
    """Return [m] the most inputs that each trial can take if the first exit is at `block`."""
    depth = np.where(instance.block >= block, instance.inputs, 0)
    trials = np.flatnonzero(depth)
    order, wrong = instance.order[trials], in_order[trials]
    starts = np.flatnonzero(np.diff(instance.block[trials], prepend=-1))
    block_of = np.cumsum(np.diff(instance.block[trials], prepend=instance.block[trials[0]]) > 0)
    positions = np.arange(instance.inputs)
    for _ in range(ROUNDS):
        takes_rightly = np.zeros((len(trials), instance.inputs), dtype=bool)
        np.put_along_axis(takes_rightly, order, ~wrong & (positions < depth[trials, None]), axis=1)
        by_block = np.logical_or.reduceat(takes_rightly, starts, axis=0)
        rescued = np.zeros((len(starts), instance.inputs), dtype=bool)  # before each block
        rescued[1:] = np.logical_or.accumulate(by_block, axis=0)[:-1]
        certain = np.cumsum(wrong & ~np.take_along_axis(rescued[block_of], order, axis=1), axis=1)
        deeper = np.minimum(depth[trials], (certain <= budget).sum(axis=1))
        if (deeper == depth[trials]).all():
            break
        depth[trials] = deeper
    return depth


def _earliest(
    instance: Instance, in_order: NDArray[np.bool_], depth: NDArray[np.int64], trials: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Return [n] the least latency at which each input can leave correctly, and at all."""
    right_ms = np.full(instance.inputs, instance.base_ms)
    any_ms = right_ms.copy()
    for trial in trials:
        exit_ms = float(instance.reach_ms[trial] + instance.lookup_ms[trial])
        taken = instance.order[trial, : depth[trial]]
        right = taken[~in_order[trial, : depth[trial]]]
        any_ms[taken] = np.minimum(any_ms[taken], exit_ms)
        right_ms[right] = np.minimum(right_ms[right], exit_ms)
    return right_ms, any_ms
