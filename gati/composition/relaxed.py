"""The published relaxed form: each variant gets a score, and the set of caches with the best score is chosen.

Maximise `sum b_ij S_ij` with `S_ij = alpha * H_ij + (1 - alpha) * LG_ij`, the latency gain
`LG_ij = base / (reach_i + T_ij)`, subject to the accuracy filter `A_ij >= A`, at most one variant per block,
memory, and one lookup at a time. Alpha is swept, and the composition of least expected latency is kept.

We add two things. Every score is positive, so the published optimum takes a cache at every block that the
constraints allow, although each lookup costs time. So the number of caches is capped, the cap is swept, too,
and expected latency decides. And the sweep of alpha bisects: the optimal score is convex in alpha, so if both
ends of a range choose the same caches, all values between them do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Protocol

from gati.composition.check import check_relaxed
from gati.composition.problem import BYTES_PER_UNIT, Candidate, Problem, Selection, estimate
from gati.composition.solvers import MixedIntegerProgram, solve
from gati.errors import SolverError

ALPHA_STEPS = 20  # alpha = 0, 1/20, ..., 1
MOST_CACHES = 6
_LEAST_SHARE = 0.001  # least time of an exit, as a share of the network's: measured differences may be zero


class Expectation(Protocol):
    """The figures that the sweep needs; both `Estimate` and `Replay` have them."""

    @property
    def mean_latency_ms(self) -> float:
        """Mean latency of a request."""

    @property
    def agreement(self) -> float:
        """Share of requests that get the base model's class."""


def relaxed_score(problem: Problem, candidate: Candidate, alpha: float) -> float:
    """Return the published score S_ij of one variant."""
    exit_ms = problem.reach_ms[candidate.block_index] + candidate.lookup_ms
    latency_gain = problem.base_ms / max(exit_ms, _LEAST_SHARE * problem.base_ms)
    return alpha * candidate.hit_rate + (1.0 - alpha) * latency_gain


def solve_relaxed(
    problem: Problem, alpha: float, *, most_caches: int | None = None, solver: str = "auto"
) -> Selection:
    """Solve the relaxed form for one alpha; `Selection.objective` is the sum of scores.

    `most_caches` caps the number of caches; None means no cap, as published. Raises SolverError.
    """
    allowed = replace(problem, candidates=_accurate(problem))
    candidates, program = allowed.candidates, MixedIntegerProgram()
    chosen = [
        program.binary(f"b_{candidate.trial_id}", cost=-relaxed_score(allowed, candidate, alpha))
        for candidate in candidates
    ]
    _add_limits(program, allowed, chosen)
    if most_caches is not None:
        program.row("most_caches", dict.fromkeys(chosen, 1.0), upper=float(most_caches))
    solution = solve(program, solver)
    if solution.status == "infeasible":
        raise SolverError(f"{solution.solver} calls the empty composition infeasible; try another --solver")
    picked = [candidate for candidate, b in zip(candidates, chosen, strict=True) if solution.chosen(b)]
    picked.sort(key=lambda candidate: candidate.block_index)
    choice = Selection(tuple(picked), -solution.objective, solution.gap, solution.solver, alpha)
    check_relaxed(problem, choice.candidates)
    return choice


def _add_limits(program: MixedIntegerProgram, problem: Problem, chosen: Sequence[int]) -> None:
    """Constrain the binaries `chosen`: one variant per block, memory, slowdown, one lookup at a time."""
    by_block: dict[int, list[int]] = defaultdict(list)
    for position, candidate in enumerate(problem.candidates):
        by_block[candidate.block_index].append(position)
    for block, positions in by_block.items():
        program.row(f"one_variant_at_block_{block}", {chosen[p]: 1.0 for p in positions}, upper=1.0)
    limit = problem.memory_limit_bytes
    if limit is not None and by_block:
        sizes = (candidate.memory_bytes / BYTES_PER_UNIT for candidate in problem.candidates)
        memory = dict(zip(chosen, sizes, strict=True))
        program.row("memory", memory, upper=limit / BYTES_PER_UNIT)
    if problem.slowdown_limit_ms is not None and by_block:
        penalties = (candidate.penalty_ms for candidate in problem.candidates)
        slowdown = dict(zip(chosen, penalties, strict=True))
        program.row("slowdown", slowdown, upper=problem.slowdown_limit_ms)
    if problem.one_lookup_at_a_time:
        _add_one_lookup_at_a_time(program, problem, chosen, by_block)


def _add_one_lookup_at_a_time(
    program: MixedIntegerProgram, problem: Problem, chosen: Sequence[int], groups: Mapping[int, Sequence[int]]
) -> None:
    # The published constraint is about the next chosen block only. Block latencies add up, so a lookup that
    # ends before the next chosen block ends before all later ones: constraining all pairs is equivalent.
    # One row per pair of blocks is the clique of all conflicting pairs, which is tighter than a row for each.
    for earlier, later in combinations(sorted(groups), 2):
        anyone = problem.candidates[groups[later][0]]
        slow = [p for p in groups[earlier] if problem.conflict(problem.candidates[p], anyone)]
        if slow:
            row = {chosen[p]: 1.0 for p in (*slow, *groups[later])}
            program.row(f"one_lookup_at_a_time_{earlier}_{later}", row, upper=1.0)


def sweep_relaxed(
    problem: Problem,
    *,
    solver: str = "auto",
    expect: Callable[[tuple[Candidate, ...]], Expectation] | None = None,
) -> Selection:
    """Solve for every alpha and cap, and return the choice of least expected latency.

    `expect` returns mean latency and agreement of a choice, by default the table's estimate. Choices expected
    below the accuracy target come last: each cache passes the filter, but later ones get the harder inputs.
    The empty choice competes, too. Ties go to fewer caches. Raises SolverError.
    """
    expect = expect or (lambda chosen: estimate(problem, chosen))

    def rank(chosen: tuple[Candidate, ...]) -> tuple[bool, float, int]:
        expected = expect(chosen)
        return (expected.agreement < problem.accuracy - 1e-9, expected.mean_latency_ms, len(chosen))

    best = Selection((), 0.0, 0.0, solver)
    best_rank = rank(())
    for cap in _caps(problem):
        for choice in _sweep_alpha(problem, cap, solver):
            this_rank = rank(choice.candidates)
            if this_rank < best_rank:
                best, best_rank = choice, this_rank
            elif not best.candidates:
                best = replace(best, solver=choice.solver)
    return best


def _caps(problem: Problem) -> list[int]:
    blocks = len({candidate.block_index for candidate in _accurate(problem)})
    return sorted({min(cap, blocks) for cap in (*range(1, MOST_CACHES + 1), blocks)} - {0})


def _sweep_alpha(problem: Problem, cap: int, solver: str) -> list[Selection]:
    solved: dict[int, Selection] = {}

    def at(step: int) -> Selection:
        if step not in solved:
            solved[step] = solve_relaxed(problem, step / ALPHA_STEPS, most_caches=cap, solver=solver)
        return solved[step]

    ranges = [(0, ALPHA_STEPS)]
    while ranges:
        low, high = ranges.pop()
        if at(low).candidates != at(high).candidates and high - low > 1:
            middle = (low + high) // 2
            ranges += [(low, middle), (middle, high)]
    return [solved[step] for step in sorted(solved)]


def _accurate(problem: Problem) -> tuple[Candidate, ...]:
    return tuple(candidate for candidate in problem.candidates if candidate.accuracy >= problem.accuracy)
