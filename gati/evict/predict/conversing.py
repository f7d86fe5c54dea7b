"""How likely conversations go on, as a policy asks for it: one key for each request.

LPC evicts what is least likely to go on, decayed by silence: the logit of the decayed probability is
logit p - (now - last) / gap, so that logit p + last / gap gives the same order at any time. Such keys change
with accesses only. With a constant p they are those of LRU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.predict.continuation import log_odds

Floats = NDArray[np.float64]
_CERTAIN = 1e9  # log odds of the oracle: more than any time, in mean gaps


class ContinuationSource(ABC):
    """Tells policies how likely the conversation of the request under way goes on.

    `gap_s` is the mean pause between a response and the next prompt. Where no probability is known, the
    conversation counts as an average one, so that LRU decides where none ever is; `figures` counts that.
    """

    def __init__(self, gap_s: float = 100.0) -> None:
        if not 0.0 < gap_s < math.inf:
            raise EvictError(f"the mean gap is {gap_s:g} s; give a time above zero, such as 100s")
        self._gap_s = gap_s
        self._key = 0.0
        self._sum = 0.0
        self._known = 0
        self._unknown = 0

    @property
    def key(self) -> float:
        """Of the request observed last; conversations of larger keys should stay."""
        return self._key

    def observe(self, ids: list[int], request: int, time_s: float) -> list[int]:
        """A request comes; all of its path is one conversation."""
        odds = self._log_odds(request)
        if math.isnan(odds):
            self._unknown += 1
            odds = self._sum / max(self._known, 1)
        else:
            self._known += 1
            self._sum += odds
        self._key = odds + time_s / self._gap_s
        return [len(ids)]

    def assign(self, slot: int, stretch: int) -> None:  # noqa: B027
        """Nothing is kept by slots: policies have the keys."""

    def copy(self, source: int, target: int) -> None:  # noqa: B027
        """Nothing is kept by slots."""

    def scores(self, count: int) -> Floats:
        """When blocks are used next is not known, [count]."""
        return np.zeros(count)

    def figures(self) -> Mapping[str, Any]:
        """How many requests came without a probability."""
        return {"without_probability": self._unknown}

    @abstractmethod
    def _log_odds(self, request: int) -> float:
        """Of the request of that number, NaN where it is not known."""


class KnownContinuation(ContinuationSource):
    """Probabilities of all requests of a trace, [requests]."""

    def __init__(self, probabilities: Floats, gap_s: float = 100.0) -> None:
        super().__init__(gap_s)
        self._odds = log_odds(probabilities).tolist()

    def _log_odds(self, request: int) -> float:
        return float(self._odds[request])


class ContinuationOracle(ContinuationSource):
    """Knows whether conversations go on, [requests]; of those that do, the least recent goes first."""

    def __init__(self, goes_on: NDArray[np.bool_], gap_s: float = 100.0) -> None:
        super().__init__(gap_s)
        self._goes_on = goes_on.tolist()

    def _log_odds(self, request: int) -> float:
        return _CERTAIN if self._goes_on[request] else -_CERTAIN


class HintedContinuation(ContinuationSource):
    """An engine says with each request how likely its conversation goes on."""

    def __init__(self, gap_s: float = 100.0) -> None:
        super().__init__(gap_s)
        self._next = math.nan

    def hint(self, probability: float) -> None:
        """For the request that comes next. Raises EvictError for what is no probability; NaN is not known."""
        if not isinstance(probability, (int, float)) or probability < 0.0 or probability > 1.0:
            raise EvictError(
                f"the hint continue={probability!r} is not a probability; give a number from 0 to 1"
            )
        self._next = probability

    def _log_odds(self, request: int) -> float:
        probability, self._next = self._next, math.nan
        return float(log_odds(np.array([probability]))[0])


def hinted(gap_s: float) -> Callable[[int, int], HintedContinuation]:
    """A factory of sources that are told, for any capacity and seed."""
    return lambda capacity, seed: HintedContinuation(gap_s)
