"""Agreement and hit rate per class, with exact confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gati.composition.binomial import agreement_lower_bound, rate_upper_bound

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

CONFIDENCE = 0.95  # per interval, not joint


@dataclass(frozen=True, kw_only=True)
class Share:
    """A proportion of inputs with its exact two-sided 95 % confidence interval (Clopper-Pearson)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ClassCount:
    """Counts for one class; the base model assigns `n` inputs to it."""

    name: str
    n: int
    agreement: Share
    hit_rate: Share


def exact_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the exact two-sided 95 % confidence interval of a proportion; (0, 1) without trials."""
    tail = (1.0 - CONFIDENCE) / 2.0
    losses = trials - successes
    return agreement_lower_bound(losses, trials, tail), rate_upper_bound(successes, trials, tail)


def count_classes(
    answer: Int[NDArray[np.int64], " n"],
    base_answer: Int[NDArray[np.int64], " n"],
    hit: Bool[NDArray[np.bool_], " n"],
    class_names: Sequence[str] | None,
) -> tuple[ClassCount, ...]:
    """Count per class, for every class that the base model predicts at least once."""
    counted = []
    for index in np.unique(base_answer):
        inside = base_answer == index
        counted.append(
            ClassCount(
                name=str(index) if class_names is None else class_names[index],
                n=int(inside.sum()),
                agreement=_share((answer == base_answer)[inside]),
                hit_rate=_share(hit[inside]),
            )
        )
    return tuple(counted)


def _share(happened: NDArray[np.bool_]) -> Share:
    successes, trials = int(happened.sum()), len(happened)
    low, high = exact_interval(successes, trials)
    return Share(value=successes / trials, low=low, high=high)
