"""Checks of a chosen composition from scratch, independent of the solver."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from gati.composition.problem import Candidate, Problem, estimate
from gati.errors import SolverError

TOLERANCE = 1e-6  # by how much a solver may violate a limit


def check_structure(problem: Problem, chosen: Sequence[Candidate]) -> None:
    """Check forward order, one variant per block, memory, slowdown and one lookup at a time.

    Raises SolverError that names the violated constraint.
    """
    for earlier, later in pairwise(chosen):
        if later.block_index <= earlier.block_index:
            _refuse(
                f"chose {earlier.trial_id} and {later.trial_id}, but exits need different blocks, in order"
            )
    limit = problem.memory_limit_bytes
    memory = sum(candidate.memory_bytes for candidate in chosen)
    if limit is not None and memory > limit:
        _refuse(f"chose {memory} bytes of caches, the limit is {limit}")
    slowest_ms = problem.slowdown_limit_ms
    penalty_ms = sum(candidate.penalty_ms for candidate in chosen)
    if slowest_ms is not None and penalty_ms > slowest_ms + TOLERANCE:
        _refuse(f"chose lookups that delay a miss by {penalty_ms:.4g} ms, the limit is {slowest_ms:.4g} ms")
    for earlier, later in combinations(chosen, 2):
        if problem.conflict(earlier, later):
            _refuse(
                f"chose {later.trial_id} while the lookup of {earlier.trial_id} ({earlier.lookup_ms:.4g} ms) "
                "would still be running"
            )


def check_relaxed(problem: Problem, chosen: Sequence[Candidate]) -> None:
    """Check the structure and the accuracy filter of the relaxed form. Raises SolverError."""
    check_structure(problem, chosen)
    for candidate in chosen:
        if candidate.accuracy < problem.accuracy:
            _refuse(
                f"chose {candidate.trial_id} with accuracy {candidate.accuracy:.4f}, "
                f"the filter requires {problem.accuracy:.4f}"
            )


def check_full(problem: Problem, chosen: Sequence[Candidate]) -> None:
    """Check the structure, rising hit rates and the accuracy of the full form. Raises SolverError."""
    check_structure(problem, chosen)
    for earlier, later in pairwise(chosen):
        if later.hit_rate < earlier.hit_rate - TOLERANCE:
            _refuse(f"chose {later.trial_id}, which has no hits beyond those of {earlier.trial_id}")
    agreement = estimate(problem, chosen).agreement
    if agreement < problem.accuracy - TOLERANCE:
        _refuse(f"chose caches with expected agreement {agreement:.5f}, the target is {problem.accuracy:.5f}")


def _refuse(what: str) -> None:
    raise SolverError(f"the solver {what}; try another --solver and report this")
