"""Whether a solver can be used here."""

from __future__ import annotations

from functools import cache

import pytest

from gati.composition.solvers import MixedIntegerProgram, solve
from gati.errors import SolverError


@cache
def reason_missing(solver: str) -> str:
    try:
        solve(MixedIntegerProgram(), solver)
    except SolverError as problem:
        return str(problem)
    return ""


def require(solver: str) -> None:
    """Skip the test, with the reason, where `solver` is not installed or has no licence."""
    if solver == "gurobi" and (reason := reason_missing(solver)):
        pytest.skip(reason)
