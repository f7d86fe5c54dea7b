"""Behaviours of options on inputs that were easy or hard in the previous stage, from outcomes per input.

Easy inputs leave at early exits, get the right label from every network, and are easy for the next stage,
too. A planner that assumed independent stages would run the large network on inputs that do not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gati.pipelines.measurements import BehaviourMeasurement

_LEVEL_SHARES = (0.5, 0.25, 0.1)  # the most confident half, the next quarter, and so on
_LATENCIES_A_LEVEL = 200
_FEWEST_LATENCIES = 20  # with fewer, those of all inputs of the level are used
_PRIOR_INPUTS = 10.0  # weight of the overall accuracy in inputs, as a prior

_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Answers:
    """Answers of one option of a stage on all inputs: arrays [n]. `level` is the level of confidence."""

    right: _Bools
    level: npt.NDArray[np.int64]
    latency_ms: _Floats


def confidence_levels(confidence: _Floats) -> tuple[float, ...]:
    """Decreasing bounds of confidence: half of the inputs are above the first, a tenth is below the last."""
    return tuple(float(np.quantile(confidence, share)) for share in _LEVEL_SHARES)


def behaviours(own: Answers, among: _Bools, before: dict[str, Answers]) -> Iterator[BehaviourMeasurement]:
    """Behaviours of an option on all inputs of its stage, then after each answer of the previous stage.

    `among` [n] marks the stage's own inputs; `before` has the answers of the previous stage, by option.
    Only inputs that the previous stage labelled correctly count: otherwise the query is wrong anyway.
    """
    levels = range(len(_LEVEL_SHARES) + 1)
    overall = [_Level.of(own, among & (own.level == level)) for level in levels]
    total = int(among.sum())
    yield _measured(None, None, overall, overall, total)
    for option, answers in before.items():
        for level in levels:
            members = among & answers.right & (answers.level == level)
            if members.any():
                found = [_Level.of(own, members & (own.level == mine)) for mine in levels]
                yield _measured(option, level, found, overall, int(members.sum()))


def spread(latency_ms: _Floats, most: int) -> tuple[float, ...]:
    """At most `most` latencies, sorted, that stand for all: each is the mean of an equal part of them.

    So the mean stays exact. If some were dropped, a rare slow request that is kept would count too often.
    """
    parts = min(latency_ms.size, most)
    sums = np.concatenate([[0.0], np.cumsum(np.sort(latency_ms))])
    ends = np.linspace(0.0, latency_ms.size, parts + 1)
    means = np.diff(np.interp(ends, np.arange(latency_ms.size + 1), sums)) * parts / latency_ms.size
    return tuple(means.round(4).tolist())


@dataclass(frozen=True)
class _Level:
    count: int
    right: int
    latency_ms: _Floats

    @classmethod
    def of(cls, answers: Answers, members: _Bools) -> _Level:
        return cls(int(members.sum()), int(answers.right[members].sum()), answers.latency_ms[members])


def _measured(
    after: str | None, level: int | None, found: list[_Level], overall: list[_Level], total: int
) -> BehaviourMeasurement:
    shares, accuracies, latencies = [], [], []
    pooled = max(overall, key=lambda one: one.count)
    for mine, everywhere in zip(found, overall, strict=True):
        usual = everywhere.right / max(everywhere.count, 1)
        enough = mine if mine.count >= _FEWEST_LATENCIES else everywhere
        timed = enough if enough.count else pooled
        shares.append(mine.count / total)
        accuracies.append((mine.right + _PRIOR_INPUTS * usual) / (mine.count + _PRIOR_INPUTS))
        latencies.append(spread(timed.latency_ms, _LATENCIES_A_LEVEL))
    return BehaviourMeasurement(after, level, tuple(shares), tuple(accuracies), tuple(latencies))
