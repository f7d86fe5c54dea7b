"""The exact composition problem as arrays: the outcome of every trial for every held-out input.

The hits of a trial are its inputs with the highest scores. Their number is a *cut*, so every relevant
threshold is a cut after a group of equal scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gati.composition.problem import SLACK_MS

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Chosen = tuple[tuple[int, int], ...]  # (trial, cut) in forward order; the trial has cut >= 1 hits


@dataclass(frozen=True)
class Instance:
    """m trials that may be chosen, n inputs. Trials are in forward order of their blocks."""

    block: NDArray[np.int64]  # [m]
    order: NDArray[np.int64]  # [m, n] inputs by falling score
    score: NDArray[np.float32]  # [m, n] falling
    may_cut: Bools  # [m, n] whether a threshold can lie after this position: the next score is lower
    wrong: Bools  # [m, n] by input: the trial's class is not the base model's
    loss: Floats  # [m, n] by input: cost of leaving there against the budget; `wrong`, or a risk
    reach_ms: Floats  # [m] to the end of the trial's block
    lookup_ms: Floats  # [m]
    penalty_ms: Floats  # [m] of a miss
    memory_bytes: NDArray[np.int64]  # [m]
    base_ms: float
    memory_limit_bytes: int | None
    one_lookup_at_a_time: bool
    slowdown_limit_ms: float | None = None  # on the sum of penalties

    @property
    def trials(self) -> int:
        """The number of trials."""
        return int(self.order.shape[0])

    @property
    def inputs(self) -> int:
        """The number of inputs."""
        return int(self.order.shape[1])

    def only(self, trials: Sequence[int]) -> Instance:
        """Return the problem of choosing among some of the trials, given in forward order."""
        rows = np.array(trials, dtype=np.int64)
        return replace(
            self,
            block=self.block[rows],
            order=self.order[rows],
            score=self.score[rows],
            may_cut=self.may_cut[rows],
            wrong=self.wrong[rows],
            loss=self.loss[rows],
            reach_ms=self.reach_ms[rows],
            lookup_ms=self.lookup_ms[rows],
            penalty_ms=self.penalty_ms[rows],
            memory_bytes=self.memory_bytes[rows],
        )

    def hits(self, trial: int, cut: int) -> Bools:
        """Return whether each input [n] scores at or above the threshold at `cut`."""
        mask = np.zeros(self.inputs, dtype=bool)
        mask[self.order[trial, :cut]] = True
        return mask

    def threshold(self, trial: int, cut: int) -> float:
        """Return the threshold of a cut: between the last score that hits and the first that does not."""
        last = np.float32(self.score[trial, cut - 1])
        if cut == self.inputs:
            return float(last)
        following = np.float32(self.score[trial, cut])
        middle = np.float32((float(last) + float(following)) / 2.0)
        return float(middle) if following < middle <= last else float(last)

    def compatible(self, earlier: int, later: int) -> bool:
        """Whether the lookup of `earlier` has ended when that of `later` begins."""
        window_ms = float(self.reach_ms[later] - self.reach_ms[earlier])
        return not self.one_lookup_at_a_time or float(self.lookup_ms[earlier]) <= window_ms + SLACK_MS

    def outcome(self, chosen: Chosen) -> ReplayOutcome:
        """Replay `chosen` on every input."""
        inside = np.ones(self.inputs, dtype=bool)
        spent_ms, penalty_ms, disagreements = 0.0, 0.0, 0.0
        for trial, cut in chosen:
            leaving = self.order[trial, :cut]
            leaving = leaving[inside[leaving]]
            spent_ms += len(leaving) * float(self.reach_ms[trial] + self.lookup_ms[trial] + penalty_ms)
            disagreements += float(self.loss[trial, leaving].sum())
            inside[leaving] = False
            penalty_ms += float(self.penalty_ms[trial])
        spent_ms += int(inside.sum()) * (self.base_ms + penalty_ms)
        return ReplayOutcome(spent_ms / self.inputs, disagreements)

    def allows(self, chosen: Chosen) -> bool:
        """Whether `chosen` satisfies one trial per block, memory, slowdown, and one lookup at a time."""
        trials = [trial for trial, _ in chosen]
        blocks = [int(self.block[trial]) for trial in trials]
        limit, slowest_ms = self.memory_limit_bytes, self.slowdown_limit_ms
        return (
            blocks == sorted(set(blocks))
            and (limit is None or int(self.memory_bytes[trials].sum()) <= limit)
            and (slowest_ms is None or float(self.penalty_ms[trials].sum()) <= slowest_ms + SLACK_MS)
            and all(self.compatible(a, b) for i, a in enumerate(trials) for b in trials[i + 1 :])
        )


@dataclass(frozen=True)
class ReplayOutcome:
    """The outcome of a choice on the inputs of an instance."""

    mean_latency_ms: float
    disagreements: float  # sum of losses: inputs that leave early with another class than the base model's


def make_instance(
    *,
    block: Sequence[int],
    score: NDArray[np.float32],
    wrong: Bools,
    reach_ms: Sequence[float],
    lookup_ms: Sequence[float],
    penalty_ms: Sequence[float],
    memory_bytes: Sequence[int],
    base_ms: float,
    memory_limit_bytes: int | None = None,
    one_lookup_at_a_time: bool = False,
    slowdown_limit_ms: float | None = None,
) -> Instance:
    """Sort the scores [m, n] of trials given in forward order; the other sequences have length m."""
    order = np.argsort(-score, axis=1, kind="stable")
    falling = np.take_along_axis(score, order, axis=1)
    may_cut = np.ones(score.shape, dtype=bool)
    may_cut[:, :-1] = falling[:, 1:] < falling[:, :-1]
    return Instance(
        block=np.asarray(block, dtype=np.int64),
        order=order,
        score=falling,
        may_cut=may_cut & np.isfinite(falling),
        wrong=wrong,
        loss=wrong.astype(np.float64),
        reach_ms=np.asarray(reach_ms, dtype=np.float64),
        lookup_ms=np.asarray(lookup_ms, dtype=np.float64),
        penalty_ms=np.asarray(penalty_ms, dtype=np.float64),
        memory_bytes=np.asarray(memory_bytes, dtype=np.int64),
        base_ms=base_ms,
        memory_limit_bytes=memory_limit_bytes,
        one_lookup_at_a_time=one_lookup_at_a_time,
        slowdown_limit_ms=slowdown_limit_ms,
    )
