"""What every solver must do with a program, and how solvers are chosen."""

from __future__ import annotations

import builtins
import sys
from unittest.mock import MagicMock

import pytest

from gati.composition.solvers import SOLVERS, MixedIntegerProgram, solve
from gati.errors import SolverError
from tests.composition.solving import require

every_solver = pytest.mark.parametrize("solver", sorted(SOLVERS))


def knapsack() -> MixedIntegerProgram:
    """Take at least one of the first two, at most 5 in weight: a (3), b (4), c (2); best is a and c."""
    program = MixedIntegerProgram()
    a, b, c = (program.binary(name, cost=cost) for name, cost in (("a", -5.0), ("b", -6.0), ("c", -3.0)))
    program.row("weight", {a: 3.0, b: 4.0, c: 2.0}, upper=5.0)
    program.row("some", {a: 1.0, b: 1.0}, lower=1.0)
    return program


@every_solver
def test_the_optimum_is_found_and_called_optimal(solver):
    require(solver)
    solution = solve(knapsack(), solver)
    assert [solution.chosen(i) for i in range(3)] == [True, False, True]
    assert solution.objective == pytest.approx(-8.0)
    assert (solution.status, solution.gap, solution.solver) == ("optimal", 0.0, solver)


@every_solver
def test_a_program_without_solution_is_infeasible_and_no_error(solver):
    require(solver)
    program = MixedIntegerProgram()
    x = program.binary("x")
    program.row("impossible", {x: 1.0}, lower=2.0, upper=3.0)
    assert solve(program, solver).status == "infeasible"


@every_solver
def test_a_row_with_equal_bounds_is_an_equation(solver):
    require(solver)
    program = MixedIntegerProgram()
    x, y = program.variable("x", cost=1.0), program.variable("y", cost=2.0, upper=10.0)
    program.row("sum", {x: 1.0, y: 1.0}, lower=3.0, upper=3.0)
    assert solve(program, solver).values == pytest.approx([1.0, 2.0])


@every_solver
def test_an_empty_program_costs_nothing(solver):
    require(solver)
    solution = solve(MixedIntegerProgram(), solver)
    assert (solution.objective, solution.status) == (0.0, "optimal")


def big() -> MixedIntegerProgram:
    program = MixedIntegerProgram()
    for i in range(2100):
        program.binary(f"x{i}", cost=-1.0)
    program.row("few", dict.fromkeys(range(2100), 1.0), upper=7.0)
    return program


def test_a_problem_beyond_the_bundled_licence_says_so_and_auto_turns_to_highs():
    require("gurobi")
    try:
        solve(big(), "gurobi")
    except SolverError as problem:
        assert "allows 2000 variables and constraints, but this problem has 2100 and 1" in str(problem)
    else:
        pytest.skip("a full Gurobi licence is installed here")
    assert solve(big(), "auto").solver == "highs"


def test_without_gurobipy_the_error_names_the_package_and_auto_turns_to_highs(monkeypatch):
    real = builtins.__import__

    def without_gurobi(name, *arguments, **keywords):
        if name == "gurobipy":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_gurobi)
    with pytest.raises(SolverError, match="pip install gurobipy, or use --solver highs"):
        solve(knapsack(), "gurobi")
    assert solve(knapsack(), "auto").solver == "highs"


@pytest.mark.parametrize("solver", ["gurobi", "auto"])
def test_ctrl_c_ends_more_than_the_solver(monkeypatch, solver):
    """Gurobi catches it, and returns the best solution that it has found."""
    gurobipy = MagicMock(GurobiError=OSError, GRB=MagicMock(INTEGER="I", CONTINUOUS="C"))
    model = gurobipy.Model.return_value.__enter__.return_value
    model.Status, model.SolCount = gurobipy.GRB.INTERRUPTED, 1
    gurobipy.Env.return_value.__exit__.return_value = gurobipy.Model.return_value.__exit__.return_value = None
    monkeypatch.setitem(sys.modules, "gurobipy", gurobipy)
    with pytest.raises(KeyboardInterrupt):
        solve(knapsack(), solver)


def test_an_unknown_solver_is_refused_with_the_choices():
    with pytest.raises(SolverError, match="unknown solver 'cplex'; choose one of: auto, gurobi, highs"):
        solve(knapsack(), "cplex")
