"""Pauses lookups that save less than they cost, or less than memory alone would save."""

from __future__ import annotations

from gati.composition.composition import Composition
from gati.engine.exits import BASE

_MEMORY = 0.98  # decay of the running mean
_JUDGED_AFTER = 60  # requests
_TRIED_AGAIN_AFTER = 1000  # requests; doubles each time
_LONGEST = 16_000


class Rest:
    """Compares the cost of requests, as measured in the composition, with the base model's.

    Read `lookups_pay` before a request and call `answered` after it. Caches that do not pay rest for a while
    and are then tried again, because the scene may change. If they rest because memory saves more, they are
    tried again as soon as it saves less.
    """

    def __init__(self) -> None:
        self._cost_ms: dict[str, float] = {}
        self._base_ms = 0.0
        self._mean_ms = 0.0
        self._count = 0
        self._rested_at = 1.0  # the mean cost when the rest began, as a share of the base model's
        self._resting = 0  # requests still to be answered by the base model
        self._next_rest = _TRIED_AGAIN_AFTER

    def replaced(self, composition: Composition) -> None:
        """Start over with other caches, which are tried immediately."""
        exits = composition.exits
        self._base_ms = composition.expected.base_latency_ms
        lookups_ms = sum(leaving.lookup_ms for leaving in exits)
        self._cost_ms = {leaving.block: leaving.exit_ms for leaving in exits}
        self._cost_ms[BASE] = self._base_ms + lookups_ms
        self._next_rest = _TRIED_AGAIN_AFTER
        self._begin()

    @property
    def lookups_pay(self) -> bool:
        """Whether to look up the next request."""
        return self._resting == 0

    def answered(self, exit: str, instead: float = 0.0) -> bool:
        """Record a request's exit (`base` if it was not looked up); returns whether a rest begins.

        `instead`: the share of these requests that memory would answer without lookups.
        """
        if self._resting:
            self._resting -= 1
            if self._resting == 0 or self._rested_at < 1.0 - instead:
                self._begin()
            return False
        self._count += 1
        cost_ms = self._cost_ms.get(exit, self._base_ms)
        self._mean_ms = _MEMORY * self._mean_ms + (1.0 - _MEMORY) * cost_ms
        if self._count < _JUDGED_AFTER:
            return False
        share = self._mean_ms / (1.0 - _MEMORY**self._count) / self._base_ms
        if share < 1.0 - instead:
            self._next_rest = _TRIED_AGAIN_AFTER
            return False
        self._rested_at = share
        self._resting, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST)
        return True

    def _begin(self) -> None:
        self._resting = self._count = 0
        self._mean_ms = 0.0
