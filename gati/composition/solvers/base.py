"""The interface between formulations and solvers: a mixed-integer program and its solution, as data.

A formulation fills a `MixedIntegerProgram`, and a solver turns it into a `Solution`. Neither knows the other,
so solvers can be compared with each other, and solutions checked without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

INFINITY = float("inf")
WITHOUT_A_SOLVER = "--objective exact with --solver auto, which can do without a solver"  # for error messages
Status = Literal["optimal", "feasible", "infeasible"]


@dataclass(frozen=True)
class Constraint:
    """`lower <= sum of coefficient * variable <= upper`; `coefficients` maps variable index to factor."""

    name: str
    coefficients: Mapping[int, float]
    lower: float
    upper: float


@dataclass
class MixedIntegerProgram:
    """A mixed-integer linear program to be minimised. Build it with `variable` and `row`."""

    costs: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    rows: list[Constraint] = field(default_factory=list)

    def variable(
        self, name: str, *, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, integer: bool = False
    ) -> int:
        """Add a variable and return its index."""
        self.costs.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        self.names.append(name)
        return len(self.costs) - 1

    def binary(self, name: str, *, cost: float = 0.0) -> int:
        """Add a variable that is 0 or 1 and return its index."""
        return self.variable(name, cost=cost, integer=True)

    def row(
        self,
        name: str,
        coefficients: Mapping[int, float],
        *,
        lower: float = -INFINITY,
        upper: float = INFINITY,
    ) -> None:
        """Add a constraint, named by its meaning."""
        self.rows.append(Constraint(name, dict(coefficients), lower, upper))


@dataclass(frozen=True)
class Solution:
    """A solver's answer. `values` is empty when infeasible; `gap` is relative, 0 when proven optimal."""

    values: NDArray[np.float64]  # [variables]
    objective: float
    gap: float
    status: Status
    solver: str

    def chosen(self, index: int) -> bool:
        """Whether the binary variable `index` is 1, regardless of the solver's rounding."""
        return bool(self.values[index] > 0.5)


class Solver(Protocol):
    """The interface of every solver."""

    name: str

    def solve(self, program: MixedIntegerProgram, *, time_limit_s: float) -> Solution:
        """Minimise `program`.

        Raises UnsolvedError when the solver is missing, refuses the size, or stopped without a solution.
        """
        ...
