"""The published full form: it minimises expected latency, based on effective hit rates.

    minimise   sum_i EH_i (reach_i + T_i) + (1 - sum_i EH_i) base + sum_i P_i (1 - H_i)
    subject to EH_i = H_i - (effective hits of the caches before i) > 0     for every chosen i
               sum_i EH_i A_i + (1 - sum_i EH_i) >= A
               one variant per block, memory, slowdown, one lookup at a time

The last term of the objective is our addition: the penalty P of a miss for every request that continues (the
lookup itself if inline). A cache without new hits is excluded, since it could only cost time.

Effective hits telescope: after cache i, exactly H_i of the requests have left, so EH_i = H_i - H_prev, where
prev is the chosen cache before i, and 1 - H_i continue. Cost and disagreement thus belong to pairs of
consecutive caches: a composition is a path through the candidates, with three limits (disagreement, memory,
slowdown). Two candidates have a joint if the later one has more hits and their lookups do not overlap. The
mixed-integer program chooses the joints. Those that a Lagrangian bound proves useless are removed first
(`paths`), which makes the program small enough for any licence and its relaxation tight.
"""

from __future__ import annotations

from collections import defaultdict

from gati.composition.check import check_full
from gati.composition.paths import Joints, joints_of, useful_joints
from gati.composition.problem import Problem, Selection
from gati.composition.solvers import MixedIntegerProgram, solve
from gati.errors import SolverError


def solve_full(problem: Problem, *, solver: str = "auto") -> Selection:
    """Solve the full form; `Selection.objective` is the expected mean latency in milliseconds.

    Raises SolverError.
    """
    joints = joints_of(problem)
    used = useful_joints(joints)
    solution = solve(full_program(joints, used), solver)
    if solution.status == "infeasible":
        raise SolverError(f"{solution.solver} calls the empty composition infeasible; try another --solver")
    chosen = sorted(
        later - 1
        for variable, (_, later) in enumerate(used)
        if solution.chosen(variable) and later != joints.end
    )
    candidates = sorted((problem.candidates[c] for c in chosen), key=lambda candidate: candidate.block_index)
    check_full(problem, candidates)
    latency_ms = solution.objective + problem.base_ms
    return Selection(tuple(candidates), latency_ms, solution.gap, solution.solver)


def full_program(joints: Joints, used: list[tuple[int, int]]) -> MixedIntegerProgram:
    """Return the program over the joints `used`: a path from start to end under every limit."""
    program = MixedIntegerProgram()
    leaving: dict[int, dict[int, float]] = defaultdict(dict)
    entering: dict[int, dict[int, float]] = defaultdict(dict)
    disagreement: dict[int, float] = {}
    memory: dict[int, float] = {}
    slowdown: dict[int, float] = {}
    for earlier, later in used:
        variable = program.binary(f"from_{earlier}_to_{later}", cost=float(joints.cost_ms[earlier, later]))
        leaving[earlier][variable] = 1.0
        entering[later][variable] = -1.0
        disagreement[variable] = float(joints.disagreement[earlier, later])
        memory[variable] = float(joints.memory[earlier, later])
        slowdown[variable] = float(joints.slowdown_ms[earlier, later])
    program.row("one_start", leaving[joints.start], lower=1.0, upper=1.0)
    for node in sorted(set(leaving) | set(entering)):
        if node not in (joints.start, joints.end):
            program.row(f"go_on_from_{node}", {**leaving[node], **entering[node]}, lower=0.0, upper=0.0)
    program.row("disagreement", disagreement, upper=1.0)
    program.row("memory", memory, upper=joints.memory_limit)
    program.row("slowdown", slowdown, upper=joints.slowdown_limit_ms)
    return program
