"""Results of a replay."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PolicyOutcome:
    """One policy at one capacity. `gap_closed` is (hit rate - LRU's) / (opt-leaf's - LRU's).

    `decision_us` has the mean, p50 and p99 time for the evictions of a request that evicted. `excess` samples
    the guard's X and A, and whether predictions were followed, at up to 200 evenly spaced requests.
    `time_saved` is the share of the time to compute all blocks that hits saved; None for `opt`, whose hits
    are not prefixes.
    """

    policy: str
    capacity_blocks: int
    predictor: str | None = None
    seed: int = 0
    hit_rate: float
    hit_rate_beyond_shared: float
    hits: int
    requested: int
    truncated: int = 0  # requests longer than the capacity
    evictions: int = 0
    blocks_per_s: float
    decision_us: dict[str, float]
    figures: dict[str, Any] = field(default_factory=dict)
    excess: list[tuple[int, int, float, bool]] = field(default_factory=list)
    gap_closed: float | None = None
    time_saved: float | None = None


@dataclass(frozen=True)
class TraceReplay:
    """All outcomes of one call of `evict.replay`."""

    trace: dict[str, Any]
    outcomes: list[PolicyOutcome]

    def of(self, policy: str, capacity_blocks: int) -> PolicyOutcome:
        """The first outcome of a policy at a capacity. Raises KeyError."""
        for outcome in self.outcomes:
            if (outcome.policy, outcome.capacity_blocks) == (policy, capacity_blocks):
                return outcome
        raise KeyError((policy, capacity_blocks))

    def to_json(self) -> str:
        """All outcomes, as strict JSON."""
        rows = []
        for outcome in self.outcomes:
            row = asdict(outcome)
            row.update(row.pop("figures"))
            rows.append(row)
        document = {"trace": self.trace, "outcomes": rows}
        return json.dumps(document, indent=2, allow_nan=False) + "\n"
