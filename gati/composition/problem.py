"""The optimisation problem as pure data, and the figures that averages predict for a choice.

Letters of the published system: H hit rate, A accuracy among hits, T lookup latency, M memory,
L block latency (here summed up: `reach_ms[i]` = L_0 + ... + L_i, everything before block 0 included).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gati.errors import CompositionError
from gati.types import TrialId

SLACK_MS = 1e-9  # tolerance for rounding in sums of latencies
# Solvers count memory in KiB: they hold rows to 1e-6, so a limit is kept to the byte.
BYTES_PER_UNIT = 1024.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One variant at one block with one threshold."""

    trial_id: TrialId
    block_index: int
    variant: str
    threshold: float
    hit_rate: float  # H: share of all inputs with score >= threshold
    accuracy: float  # A: agreement with the base model among these
    lookup_ms: float  # T
    penalty_ms: float  # added to every request that continues after a miss; T itself when inline
    memory_bytes: int  # M


@dataclass(frozen=True)
class Problem:
    """The candidates, the latencies of the network, and the limits.

    `reach_ms[i]` is the time to the end of block i, ascending; `base_ms` the whole network without caches.
    Leaving at a chosen candidate costs `reach_ms` of its block, the penalties of the earlier chosen ones, and
    its own lookup; running to the end costs `base_ms` and all penalties.
    """

    reach_ms: tuple[float, ...]
    base_ms: float
    candidates: tuple[Candidate, ...]
    accuracy: float
    memory_limit_bytes: int | None = None
    one_lookup_at_a_time: bool = True
    slowdown_limit_ms: float | None = None  # limit on the sum of all penalties

    def __post_init__(self) -> None:
        if not 0.0 < self.accuracy < 1.0:
            raise CompositionError(
                f"accuracy target is {self.accuracy!r}, but must lie strictly between 0 and 1, such as 0.99"
            )
        if any(later < earlier for earlier, later in pairwise(self.reach_ms)):
            raise CompositionError("block latencies in the profile are not cumulative; explore again")

    def conflict(self, first: Candidate, second: Candidate) -> bool:
        """Whether the lookups of two candidates at different blocks would run at the same time."""
        if not self.one_lookup_at_a_time:
            return False
        earlier, later = sorted((first, second), key=lambda candidate: candidate.block_index)
        window_ms = self.reach_ms[later.block_index] - self.reach_ms[earlier.block_index]
        return earlier.lookup_ms > window_ms + SLACK_MS


@dataclass(frozen=True)
class Selection:
    """The choice of a formulation, in forward order, with the solver's objective and gap."""

    candidates: tuple[Candidate, ...]
    objective: float
    gap: float | None
    solver: str
    alpha: float | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Figures expected from the trials table's averages, if inputs that hit early would also hit later."""

    mean_latency_ms: float
    hit_rate: float
    agreement: float
    effective_hit_rates: tuple[float, ...]  # per chosen cache: share of all requests that leave there
    exit_ms: tuple[float, ...]  # per chosen cache: latency of a request that leaves there


def estimate(problem: Problem, chosen: Sequence[Candidate]) -> Estimate:
    """Return the expectation for `chosen` (forward order) under nested hits.

    A cache whose hit rate is below that of an earlier one has no new hits but still costs its penalty.
    """
    caught = wrong = spent_ms = penalty_ms = 0.0
    effective: list[float] = []
    exits_ms: list[float] = []
    for candidate in chosen:
        new = max(0.0, candidate.hit_rate - caught)
        exit_ms = problem.reach_ms[candidate.block_index] + penalty_ms + candidate.lookup_ms
        spent_ms += new * exit_ms
        wrong += new * (1.0 - candidate.accuracy)
        caught += new
        penalty_ms += candidate.penalty_ms
        effective.append(new)
        exits_ms.append(exit_ms)
    spent_ms += (1.0 - caught) * (problem.base_ms + penalty_ms)
    if not math.isfinite(spent_ms):
        raise CompositionError("the trials table holds latencies that are not finite; explore again")
    return Estimate(
        mean_latency_ms=spent_ms,
        hit_rate=caught,
        agreement=1.0 - wrong,
        effective_hit_rates=tuple(effective),
        exit_ms=tuple(exits_ms),
    )
