"""Random small problems for hypothesis."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import strategies as st

from gati.composition.problem import Candidate, Problem
from gati.types import TrialId


def hundredths(low: int, high: int) -> st.SearchStrategy[float]:
    """Round numbers, so that ties and equalities happen."""
    return st.integers(low, high).map(lambda value: value / 100)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    blocks = draw(st.integers(1, 5))
    own = draw(st.lists(hundredths(5, 60), min_size=blocks, max_size=blocks))
    if draw(st.booleans()):
        own[0] = 0.0  # the input, where students, companions and the network itself are looked up
    reach = tuple(accumulate(own))
    candidates = []
    for block in range(blocks):
        for variant in range(draw(st.integers(0, 3))):
            lookup = draw(hundredths(1, 80))
            candidates.append(
                Candidate(
                    trial_id=TrialId(f"t{block}-{variant}"),
                    block_index=block,
                    variant=f"fc({variant})",
                    threshold=0.5,
                    hit_rate=draw(hundredths(0, 100)),
                    accuracy=draw(hundredths(80, 100)),
                    lookup_ms=lookup,
                    # above the lookup where the network lacks the cores of overlapped lookups
                    penalty_ms=draw(st.sampled_from((0.0, lookup / 4, lookup, 1.5 * lookup))),
                    memory_bytes=draw(st.integers(1, 5000)),
                )
            )
    return Problem(
        reach_ms=reach,
        base_ms=reach[-1] + draw(hundredths(0, 50)),
        candidates=tuple(candidates),
        accuracy=draw(st.sampled_from((0.85, 0.9, 0.95, 0.99))),
        memory_limit_bytes=draw(st.none() | st.integers(1, 12000)),
        one_lookup_at_a_time=draw(st.booleans()),
        slowdown_limit_ms=draw(st.none() | hundredths(1, 120)),
    )
