"""The probability that a conversation continues, as a key per request for policies.

LPC evicts the conversations that are least likely to continue, decayed by silence: the logit of the decayed
probability is logit p - (now - last) / gap, so logit p + last / gap gives the same order at any time. These
keys change only with accesses. With a constant p, they give the order of LRU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from numbers import Real  # NumPy's numbers, too
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.predict.continuation import log_odds

Floats = NDArray[np.float64]
_CERTAIN = 1e9  # log odds of the oracle: more than any time, in mean gaps


class ContinuationSource(ABC):
    """Provides policies with the key of the current request's conversation.

    `gap_s` is the mean pause between a response and the next prompt. A conversation without a known
    probability counts as an average one, so LRU decides if none is ever known; `figures` counts these.
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
        """The key of the last observed request; conversations with larger keys should stay cached."""
        return self._key

    def observe(self, ids: list[int], request: int, time_s: float) -> list[int]:
        """Process a request, whose whole path is one conversation."""
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
        """Do nothing: policies store the keys."""

    def copy(self, source: int, target: int) -> None:  # noqa: B027
        """Do nothing."""

    def scores(self, count: int) -> Floats:
        """Zeros, since the next uses of blocks are unknown, [count]."""
        return np.zeros(count)

    def figures(self) -> Mapping[str, Any]:
        """The number of requests without a probability."""
        return {"without_probability": self._unknown}

    @abstractmethod
    def _log_odds(self, request: int) -> float:
        """The log odds for the request of that number, NaN if unknown."""


class KnownContinuation(ContinuationSource):
    """Probabilities of all requests of a trace, [requests]."""

    def __init__(self, probabilities: Floats, gap_s: float = 100.0) -> None:
        super().__init__(gap_s)
        self._odds = log_odds(probabilities).tolist()

    def _log_odds(self, request: int) -> float:
        return float(self._odds[request])


class ContinuationOracle(ContinuationSource):
    """Knows which conversations continue, [requests]; of those that do, the least recent is evicted first."""

    def __init__(self, goes_on: NDArray[np.bool_], gap_s: float = 100.0) -> None:
        super().__init__(gap_s)
        self._goes_on = goes_on.tolist()

    def _log_odds(self, request: int) -> float:
        return _CERTAIN if self._goes_on[request] else -_CERTAIN


class HintedContinuation(ContinuationSource):
    """Uses the probability that the engine passes with each request."""

    def __init__(self, gap_s: float = 100.0) -> None:
        super().__init__(gap_s)
        self._next = math.nan

    def hint(self, probability: float) -> None:
        """Set the probability for the next request; NaN if unknown. Raises EvictError for other values."""
        if not isinstance(probability, Real) or probability < 0.0 or probability > 1.0:
            raise EvictError(
                f"the hint continue={probability!r} is not a probability; give a number from 0 to 1"
            )
        self._next = float(probability)

    def _log_odds(self, request: int) -> float:
        probability, self._next = self._next, math.nan
        return float(log_odds(np.array([probability]))[0])


def hinted(gap_s: float) -> Callable[[int, int], HintedContinuation]:
    """A factory of sources that use hints, for any capacity and seed. Raises EvictError for a wrong gap."""
    HintedContinuation(gap_s)
    return lambda capacity, seed: HintedContinuation(gap_s)
