"""Gurobi. The licence inside `pip install gurobipy` allows 2,000 variables and 2,000 constraints, offline."""

from __future__ import annotations

from typing import Any

import numpy as np

from gati.composition.solvers.base import INFINITY, WITHOUT_A_SOLVER, MixedIntegerProgram, Solution
from gati.errors import UnsolvedError

LICENCE_ADVICE = "use --solver highs, or install a Gurobi licence"


class GurobiSolver:
    """Solves with gurobipy. Every environment is closed again, which releases its licence token."""

    name = "gurobi"

    def solve(self, program: MixedIntegerProgram, *, time_limit_s: float) -> Solution:
        """Minimise `program`; see `Solver.solve`."""
        try:
            import gurobipy
        except ImportError:
            raise UnsolvedError(
                "solver 'gurobi' needs the package gurobipy: pip install gurobipy, or use --solver highs"
            ) from None
        refusal = ""
        try:
            parameters = {"OutputFlag": 0, "LogToConsole": 0, "Threads": 2, "Seed": 0, "MIPGap": 0.0}
            with (
                gurobipy.Env(params={**parameters, "TimeLimit": time_limit_s}) as environment,
                gurobipy.Model("gati", env=environment) as model,
            ):
                return _solve(gurobipy, model, program)
        except gurobipy.GurobiError as problem:
            refusal = str(problem)
        # Raised outside the handler, so that there is one traceback instead of two.
        if "size-limited" in refusal:
            raise UnsolvedError(
                f"Gurobi's bundled licence allows 2000 variables and constraints, but this problem has "
                f"{len(program.costs)} and {len(program.rows)}; {LICENCE_ADVICE}"
            )
        raise UnsolvedError(f"Gurobi refused the problem ({refusal}); {LICENCE_ADVICE}")


def _solve(gurobipy: Any, model: Any, program: MixedIntegerProgram) -> Solution:
    grb = gurobipy.GRB
    kinds = np.where(program.integer, grb.INTEGER, grb.CONTINUOUS)
    variables = [
        model.addVar(lb=lower, ub=upper, obj=cost, vtype=kind, name=name)
        for lower, upper, cost, kind, name in zip(
            program.lower, program.upper, program.costs, kinds, program.names, strict=True
        )
    ]
    for row in program.rows:
        total = gurobipy.LinExpr(list(row.coefficients.values()), [variables[i] for i in row.coefficients])
        if row.lower == row.upper:
            model.addLConstr(total, grb.EQUAL, row.upper, row.name)
            continue
        if row.upper < INFINITY:
            model.addLConstr(total, grb.LESS_EQUAL, row.upper, row.name)
        if row.lower > -INFINITY:
            model.addLConstr(total, grb.GREATER_EQUAL, row.lower, row.name)
    model.optimize()
    if model.Status == grb.INTERRUPTED:  # Gurobi catches Ctrl-C, and would let the command go on
        raise KeyboardInterrupt
    if model.Status in (grb.INFEASIBLE, grb.INF_OR_UNBD):
        return Solution(np.empty(0), INFINITY, 0.0, "infeasible", GurobiSolver.name)
    if model.SolCount == 0:
        raise UnsolvedError(
            f"Gurobi stopped without a solution (status {model.Status}); "
            f"try --solver highs, or {WITHOUT_A_SOLVER}"
        )
    proven = model.Status == grb.OPTIMAL
    gap = float(model.MIPGap) if model.IsMIP else 0.0
    values = np.array([variable.X for variable in variables])
    return Solution(values, float(model.ObjVal), gap, "optimal" if proven else "feasible", GurobiSolver.name)
