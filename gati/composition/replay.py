"""Replaying a composition on each held-out input, for exact outcomes instead of averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gati.composition.candidates import least_penalty_ms
from gati.composition.composition import Exit, Expected
from gati.errors import DataError


@dataclass(frozen=True)
class ExitCost:
    """Costs of an exit: reaching its block, the lookup, and the penalty after a miss."""

    reach_ms: float
    lookup_ms: float
    penalty_ms: float


def exit_costs(exits: Sequence[Exit]) -> list[ExitCost]:
    """The costs of a composition's exits (forward order), by its own measurements.

    Files of older versions do not have what overlapped lookups add to a miss: the least is assumed.
    """
    found: list[ExitCost] = []
    paid_ms = 0.0
    for leaving in exits:
        penalty_ms = leaving.penalty_ms
        if penalty_ms is None:
            penalty_ms = least_penalty_ms(leaving.lookup_ms, leaving.placement)
        found.append(ExitCost(leaving.exit_ms - paid_ms - leaving.lookup_ms, leaving.lookup_ms, penalty_ms))
        paid_ms += penalty_ms
    return found


@dataclass(frozen=True)
class ReplayExit:
    """One exit to replay, with its outcomes on every input and its costs."""

    score: NDArray[np.float32]  # [n]
    predicted: NDArray[np.int64]  # [n]
    threshold: float
    cost: ExitCost


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The outcome over all n inputs."""

    mean_latency_ms: float
    hit_rate: float
    agreement: float
    hits: tuple[int, ...]  # per exit: inputs that left there
    agreeing: tuple[int, ...]  # per exit: those of them that got the base model's class
    exit_ms: tuple[float, ...]  # per exit: latency of an input that leaves there
    left_at: NDArray[np.int64]  # [n] exit each input left at; the number of exits for the base model
    answer: NDArray[np.int64]  # [n] the class each input got
    wrong: NDArray[np.bool_]  # [n] whether the class differs from the base model's

    def expected(self, base_ms: float, exits: Sequence[Exit]) -> Expected:
        """The figures of a composition of these exits; `base_ms` is the whole network's latency."""
        return Expected(
            mean_latency_ms=self.mean_latency_ms,
            base_latency_ms=base_ms,
            gain=base_ms / self.mean_latency_ms,
            hit_rate=self.hit_rate,
            agreement=self.agreement,
            memory_bytes=sum(leaving.memory_bytes for leaving in exits),
        )


def replay(exits: Sequence[ReplayExit], base_class: NDArray[np.int64], base_ms: float) -> Replay:
    """Send every input through `exits` (forward order); each leaves at its first score >= threshold.

    `base_class` [n] is the base model's class of each input. Raises DataError without inputs.
    """
    count = len(base_class)
    left_at = np.full(count, len(exits), dtype=np.int64)
    answer = base_class.copy()
    for position, exit_ in enumerate(exits):
        # float32 against float32, as the engine compares
        new = (left_at == len(exits)) & (exit_.score >= np.float32(exit_.threshold))
        left_at[new] = position
        answer[new] = exit_.predicted[new]
    return summarise([exit_.cost for exit_ in exits], left_at, answer, base_class, base_ms)


def summarise(
    costs: Sequence[ExitCost],
    left_at: NDArray[np.int64],
    answer: NDArray[np.int64],
    base_class: NDArray[np.int64],
    base_ms: float,
) -> Replay:
    """Return the outcome of inputs that left at `left_at` [n] with the class `answer` [n].

    `left_at` is the number of exits for an input that ran the whole network. Raises DataError without inputs.
    """
    count = len(base_class)
    if count == 0:
        raise DataError("no held-out inputs to replay; explore with more validation data")
    wrong = answer != base_class
    hits: list[int] = []
    agreeing: list[int] = []
    exit_ms: list[float] = []
    penalty_ms = 0.0
    for position, cost in enumerate(costs):
        here = left_at == position
        hits.append(int(here.sum()))
        agreeing.append(int((here & ~wrong).sum()))
        exit_ms.append(cost.reach_ms + penalty_ms + cost.lookup_ms)
        penalty_ms += cost.penalty_ms
    to_the_end_ms = base_ms + penalty_ms
    saved_ms = sum(hit * (to_the_end_ms - at_exit_ms) for hit, at_exit_ms in zip(hits, exit_ms, strict=True))
    return Replay(
        mean_latency_ms=to_the_end_ms - saved_ms / count,
        hit_rate=sum(hits) / count,
        agreement=1.0 - float(wrong.mean()),
        hits=tuple(hits),
        agreeing=tuple(agreeing),
        exit_ms=tuple(exit_ms),
        left_at=left_at,
        answer=answer,
        wrong=wrong,
    )
