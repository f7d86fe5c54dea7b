"""HiGHS: an open solver that is always available and has no size limit."""

from __future__ import annotations

from typing import Any

import numpy as np

from gati.composition.solvers.base import INFINITY, WITHOUT_A_SOLVER, MixedIntegerProgram, Solution
from gati.errors import UnsolvedError

OPTIONS: dict[str, Any] = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 0,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 1e-9,
}


class HighsSolver:
    """Solves with highspy, on one thread, so that the same problem always has the same solution."""

    name = "highs"

    def solve(self, program: MixedIntegerProgram, *, time_limit_s: float) -> Solution:
        """Minimise `program`; see `Solver.solve`."""
        try:
            import highspy
        except ImportError:
            raise UnsolvedError("solver 'highs' needs the package highspy: pip install highspy") from None
        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in {**OPTIONS, "time_limit": float(time_limit_s)}.items():
            solver.setOptionValue(option, value)
        solver.passModel(_model(highspy, program))
        solver.run()
        return _solution(highspy, solver)


def _model(highspy: Any, program: MixedIntegerProgram) -> Any:
    linear = highspy.HighsLp()
    linear.num_col_ = len(program.costs)
    linear.num_row_ = len(program.rows)
    linear.col_cost_ = np.array(program.costs, dtype=float)
    linear.col_lower_ = np.array(program.lower, dtype=float)
    linear.col_upper_ = np.array(program.upper, dtype=float)
    linear.row_lower_ = np.array([row.lower for row in program.rows], dtype=float)
    linear.row_upper_ = np.array([row.upper for row in program.rows], dtype=float)
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    linear.integrality_ = [kinds[integer] for integer in program.integer]
    linear.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lengths = [len(row.coefficients) for row in program.rows]
    linear.a_matrix_.start_ = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    linear.a_matrix_.index_ = np.array([i for row in program.rows for i in row.coefficients], dtype=np.int32)
    linear.a_matrix_.value_ = np.array(
        [value for row in program.rows for value in row.coefficients.values()], dtype=float
    )
    return linear


def _solution(highspy: Any, solver: Any) -> Solution:
    status = solver.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return Solution(np.empty(0), INFINITY, 0.0, "infeasible", HighsSolver.name)
    if status == highspy.HighsModelStatus.kModelEmpty:
        return Solution(np.empty(0), 0.0, 0.0, "optimal", HighsSolver.name)
    info = solver.getInfo()
    if info.primal_solution_status != 2:  # kSolutionStatusFeasible
        raise UnsolvedError(
            f"HiGHS stopped without a solution ({solver.modelStatusToString(status)}); "
            f"try --solver gurobi, or {WITHOUT_A_SOLVER}"
        )
    proven = status == highspy.HighsModelStatus.kOptimal
    gap = float(info.mip_gap) if np.isfinite(info.mip_gap) else (0.0 if proven else INFINITY)
    values = np.array(solver.getSolution().col_value)
    return Solution(
        values,
        float(info.objective_function_value),
        0.0 if proven else gap,
        "optimal" if proven else "feasible",
        HighsSolver.name,
    )
