"""The published full form: expected latency itself is minimised, on effective hit rates.

    minimise   sum_i EH_i (reach_i + T_i) + (1 - sum_i EH_i) base + sum_i b_i P_i (1 - H_i)
    subject to EH_i = H_i - (effective hits of the caches before i) >= 0     for every chosen i
               sum_i EH_i A_i + (1 - sum_i EH_i) >= A
               one variant a block, memory, one lookup at a time

The last term of the objective is ours: what a lookup that missed costs every request that goes on (P; the
lookup itself when inline). Effective hits telescope: up to and with a chosen cache i exactly H_i of the
requests have left, so 1 - H_i go on and the term stays linear. A cache that would catch nothing new
(EH_i < 0) is excluded. The program has two variables a candidate: `b` (chosen) and `e` (effective hits).
"""

from __future__ import annotations

from gati.compose.check import check_full
from gati.compose.problem import Choice, Problem
from gati.compose.shared import add_structure, by_block, read_choice
from gati.compose.solvers import Program, solve
from gati.errors import SolverError

__all__ = ["full_program", "solve_full"]


def solve_full(problem: Problem, *, solver: str = "auto") -> Choice:
    """Solve the full form; `Choice.objective` is the expected mean latency in milliseconds.

    Raises SolverError.
    """
    program, chosen = full_program(problem)
    solution = solve(program, solver)
    if solution.status == "infeasible":
        raise SolverError(f"{solution.solver} calls the empty composition infeasible; try another --solver")
    latency_ms = solution.objective + problem.base_ms
    choice = Choice(read_choice(problem, chosen, solution), latency_ms, solution.gap, solution.solver)
    check_full(problem, choice.candidates)
    return choice


def full_program(problem: Problem) -> tuple[Program, list[int]]:
    """Return the program (its costs relative to no caches, i.e. less `base_ms`) and the chosen binaries."""
    program = Program()
    chosen: list[int] = []  # b: the candidate is chosen
    effective: list[int] = []  # e: share of all requests that leave there
    for candidate in problem.candidates:
        tag = f"{candidate.trial_id}_{len(chosen)}"
        missed_ms = candidate.penalty_ms * (1.0 - candidate.hit_rate)
        exit_ms = problem.reach_ms[candidate.block_index] + candidate.lookup_ms
        chosen.append(program.binary(f"b_{tag}", cost=missed_ms))
        effective.append(program.variable(f"e_{tag}", cost=exit_ms - problem.base_ms))
    add_structure(program, problem, chosen)
    _add_effective_hits(program, problem, chosen, effective)
    wrong = {e: 1.0 - candidate.accuracy for e, candidate in zip(effective, problem.candidates, strict=True)}
    if wrong:
        program.row("disagreement", wrong, upper=1.0 - problem.accuracy)
    return program, chosen


def _add_effective_hits(program: Program, problem: Problem, chosen: list[int], effective: list[int]) -> None:
    for e, b, candidate in zip(effective, chosen, problem.candidates, strict=True):
        program.row("leave_only_where_chosen", {e: 1.0, b: -candidate.hit_rate}, upper=0.0)
    left: dict[int, float] = {}  # all e up to and with the block at hand
    for block, positions in by_block(problem.candidates).items():
        left.update({effective[p]: 1.0 for p in positions})
        hits = {chosen[p]: problem.candidates[p].hit_rate for p in positions}
        # left = H of the cache chosen here; free when there is none
        program.row(f"left_by_{block}_at_least", {**left, **{b: -h for b, h in hits.items()}}, lower=0.0)
        at_most = {**left, **{b: 1.0 - h for b, h in hits.items()}}
        program.row(f"left_by_{block}_at_most", at_most, upper=1.0)
