"""Solvers of mixed-integer programs, by name."""

from __future__ import annotations

from gati.composition.solvers.base import MixedIntegerProgram, Solution, Solver
from gati.composition.solvers.gurobi import GurobiSolver
from gati.composition.solvers.highs import HighsSolver
from gati.errors import SolverError, UnsolvedError

__all__ = ["SOLVERS", "TIME_LIMIT_S", "MixedIntegerProgram", "Solution", "Solver", "solve"]

SOLVERS: dict[str, Solver] = {"gurobi": GurobiSolver(), "highs": HighsSolver()}
TIME_LIMIT_S = 60.0


def solve(
    program: MixedIntegerProgram, solver: str = "auto", *, time_limit_s: float = TIME_LIMIT_S
) -> Solution:
    """Minimise `program` with the named solver; `auto` tries Gurobi, then HiGHS.

    Raises SolverError for an unknown name, UnsolvedError if the solver cannot be used or finds no solution.
    """
    if solver == "auto":
        try:
            return SOLVERS["gurobi"].solve(program, time_limit_s=time_limit_s)
        except UnsolvedError:
            return SOLVERS["highs"].solve(program, time_limit_s=time_limit_s)
    return SOLVERS[check_solver(solver)].solve(program, time_limit_s=time_limit_s)


def check_solver(name: str) -> str:
    """Return `name` if it is a registered solver or `auto`; raises SolverError that lists the choices."""
    if name != "auto" and name not in SOLVERS:
        raise SolverError(f"unknown solver {name!r}; choose one of: auto, {', '.join(sorted(SOLVERS))}")
    return name
