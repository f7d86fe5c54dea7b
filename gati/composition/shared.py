"""Variables and constraints that both published formulations share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gati.composition.problem import Candidate, Problem
from gati.composition.solvers.base import MixedIntegerProgram, Solution

# Memory is counted in KiB: solvers hold rows to 1e-6, so a limit is kept to the byte.
BYTES_PER_UNIT = 1024.0


def by_block(candidates: Sequence[Candidate]) -> dict[int, list[int]]:
    """Return the positions of the candidates at each block, blocks in forward order."""
    groups: dict[int, list[int]] = defaultdict(list)
    for position, candidate in enumerate(candidates):
        groups[candidate.block_index].append(position)
    return dict(sorted(groups.items()))


def add_structure(program: MixedIntegerProgram, problem: Problem, chosen: Sequence[int]) -> None:
    """Constrain the binaries `chosen`: one variant per block, memory, slowdown, one lookup at a time."""
    groups = by_block(problem.candidates)
    for block, positions in groups.items():
        program.row(f"one_variant_at_block_{block}", {chosen[p]: 1.0 for p in positions}, upper=1.0)
    limit = problem.memory_limit_bytes
    if limit is not None and groups:
        sizes = (candidate.memory_bytes / BYTES_PER_UNIT for candidate in problem.candidates)
        memory = dict(zip(chosen, sizes, strict=True))
        program.row("memory", memory, upper=limit / BYTES_PER_UNIT)
    if problem.slowdown_limit_ms is not None and groups:
        penalties = (candidate.penalty_ms for candidate in problem.candidates)
        slowdown = dict(zip(chosen, penalties, strict=True))
        program.row("slowdown", slowdown, upper=problem.slowdown_limit_ms)
    if problem.one_lookup_at_a_time:
        _add_one_lookup_at_a_time(program, problem, chosen, groups)


def _add_one_lookup_at_a_time(
    program: MixedIntegerProgram, problem: Problem, chosen: Sequence[int], groups: Mapping[int, Sequence[int]]
) -> None:
    # The published constraint is about the next chosen block only. Block latencies add up, so a lookup that
    # ends before the next chosen block ends before all later ones: constraining all pairs is equivalent.
    # One row per pair of blocks is the clique of all conflicting pairs, which is tighter than a row for each.
    blocks = list(groups)
    for at, earlier in enumerate(blocks):
        for later in blocks[at + 1 :]:
            anyone = problem.candidates[groups[later][0]]
            slow = [p for p in groups[earlier] if problem.conflict(problem.candidates[p], anyone)]
            if slow:
                row = {chosen[p]: 1.0 for p in (*slow, *groups[later])}
                program.row(f"one_lookup_at_a_time_{earlier}_{later}", row, upper=1.0)


def read_choice(problem: Problem, chosen: Sequence[int], solution: Solution) -> tuple[Candidate, ...]:
    """Return the candidates whose binary is 1, in forward order."""
    picked = [c for c, variable in zip(problem.candidates, chosen, strict=True) if solution.chosen(variable)]
    return tuple(sorted(picked, key=lambda candidate: candidate.block_index))
