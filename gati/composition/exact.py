"""The exact form: thresholds and caches chosen by the real outcome of each held-out input.

    minimise   mean latency, each input leaving at its first hit
    subject to disagreements <= budget, one variant per block, memory, and, overlapped, one lookup at a time

Small instances are solved to optimality as a mixed-integer program. Larger ones are solved by local search
(`search`), without a proof of optimality. `priced_bound` gives a lower bound on the latency of any
composition. The reported gap is the distance to it, so part of it is due to the relaxation rather than to the
search.

Saved latency is not submodular in the set of exits: an early exit takes inputs from a later one and may waste
the budget. So the guarantee of greedy algorithms does not hold here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from gati.composition.instance import Chosen, Instance, ReplayOutcome
from gati.composition.priced_bound import priced_bound_ms
from gati.composition.problem import BYTES_PER_UNIT
from gati.composition.search import ROUNDING, Frontier, search_frontier
from gati.composition.solvers import MixedIntegerProgram, Solution, solve
from gati.errors import SolverError, UnsolvedError

_log = logging.getLogger(__name__)
LARGEST_PROGRAM = 600  # merged inputs times trials that a solver proves optimal in seconds
SEARCH = "search"


@dataclass(frozen=True)
class ExactChoice:
    """A composition with its replayed outcome, and a lower bound on the latency of any composition."""

    chosen: Chosen
    outcome: ReplayOutcome
    bound_ms: float
    solver: str

    @property
    def gap(self) -> float | None:
        """Relative distance to the bound; 0 if proven optimal, None if no bound was computed."""
        return None if self.bound_ms <= 0.0 else max(0.0, 1.0 - self.bound_ms / self.outcome.mean_latency_ms)


def solve_exact(
    instance: Instance,
    budget: int,
    *,
    frontier: Frontier | None = None,
    solver: str = "auto",
    thorough: bool = True,
    prove: bool = True,
) -> ExactChoice:
    """Return the fastest composition found with at most `budget` disagreements.

    `frontier` is the result of `search_frontier`, for reuse across budgets. With `prove` False even small
    instances are searched, and the bound is 0. If solver "auto" is missing, runs out of time or is wrong,
    the result is that of the search. Raises SolverError.
    """
    if not instance.trials:  # every lookup takes longer than it could save
        return ExactChoice((), instance.outcome(()), instance.base_ms, SEARCH)
    if prove and fits_program(instance):
        try:
            return solve_program(instance, budget, solver=solver)
        except SolverError as error:
            if solver != "auto":
                raise
            if not isinstance(error, UnsolvedError):
                _log.warning("the result is that of the search, since a solver was wrong: %s", error)
    frontier = frontier or search_frontier(instance)
    chosen = frontier.within(budget, thorough=thorough)
    bound = priced_bound_ms(instance, budget) if prove else 0.0
    outcome = instance.outcome(chosen)
    _check(instance, chosen, outcome, budget, SEARCH)
    return ExactChoice(chosen, outcome, bound, SEARCH)


def fits_program(instance: Instance) -> bool:
    """Say whether the instance is small enough to be proven optimal by a solver."""
    return instance.trials * instance.inputs <= 50 * LARGEST_PROGRAM and (
        instance.trials * merge_inputs(instance)[0].shape[1] <= LARGEST_PROGRAM
    )


def merge_inputs(
    instance: Instance,
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Merge inputs that are equal for every trial.

    Returns the group of equal scores [m, rows], 0 for the highest; whether the trial is wrong [m, rows]; and
    the number of inputs per row [rows].
    """
    groups_in_order: NDArray[np.int64] = np.cumsum(instance.may_cut, axis=1) - instance.may_cut
    groups: NDArray[np.int64] = np.empty_like(groups_in_order)
    np.put_along_axis(groups, instance.order, groups_in_order, axis=1)
    rows, count = np.unique(np.concatenate([groups, instance.wrong]), axis=1, return_counts=True)
    return rows[: instance.trials], rows[instance.trials :].astype(bool), count


def solve_program(instance: Instance, budget: int, *, solver: str = "auto") -> ExactChoice:
    """Solve the exact form as a mixed-integer program. Raises SolverError."""
    program, takes = exact_program(instance, budget)
    solution = solve(program, solver)
    if solution.status == "infeasible":
        raise SolverError(f"{solution.solver} calls the empty composition infeasible; try another --solver")
    # of each trial's cuts, which rise, the last one that it takes
    last = {trial: cut for (trial, cut), variable in takes.items() if solution.chosen(variable)}
    chosen = tuple(sorted(last.items()))
    outcome = instance.outcome(chosen)
    _check(instance, chosen, outcome, budget, solution.solver)
    return ExactChoice(chosen, outcome, _proven(solution), solution.solver)


def _proven(solution: Solution) -> float:
    return solution.objective - solution.gap * abs(solution.objective)


def exact_program(instance: Instance, budget: int) -> tuple[MixedIntegerProgram, dict[tuple[int, int], int]]:
    """Return the program and its decision variables, by (trial, cut), cuts rising.

    takes_tc: trial t serves with cut c or a later one, so an input hits if t takes the first cut behind it:
    one variable instead of the sum over all such cuts. inside_sb: row s is still inside after block b.
    leaves_st: row s leaves at trial t. misses_st: row s misses trial t and continues.
    """
    groups, wrong, count = merge_inputs(instance)
    share = count / instance.inputs
    program = MixedIntegerProgram()
    takes: dict[tuple[int, int], int] = {}
    hit_by: list[list[int]] = []  # by trial and group: with that variable, the group hits
    for trial in range(instance.trials):
        cuts = [int(position) + 1 for position in np.flatnonzero(instance.may_cut[trial])]
        hit_by.append([program.binary(f"takes_{trial}_{cut}") for cut in cuts])
        takes |= {(trial, cut): variable for cut, variable in zip(cuts, hit_by[trial], strict=True)}
        for earlier, later in pairwise(hit_by[trial]):
            program.row("a_later_cut_takes_the_earlier_one", {later: 1.0, earlier: -1.0}, upper=0.0)
    _add_limits(program, instance, hit_by)
    disagreements: dict[int, float] = {}
    for row in range(groups.shape[1]):
        before: int | None = None
        for block in np.unique(instance.block):
            inside = program.variable(f"inside_{row}_{block}")
            leaving: dict[int, float] = {}
            hits: dict[int, float] = {}
            for trial in map(int, np.flatnonzero(instance.block == block)):
                group = int(groups[trial, row])
                hit = {variable: 1.0 for variable in hit_by[trial][group : group + 1]}
                served = {variable: -1.0 for variable in hit_by[trial][:1]}
                exit_ms = float(instance.reach_ms[trial] + instance.lookup_ms[trial])
                cost = share[row] * (exit_ms - instance.base_ms)
                leaves = program.variable(f"leaves_{row}_{trial}", cost=float(cost))
                program.row("leaves_only_by_a_hit", {leaves: 1.0, **{v: -1.0 for v in hit}}, upper=0.0)
                missed = float(share[row] * instance.penalty_ms[trial])
                misses = program.variable(f"misses_{row}_{trial}", cost=missed)
                program.row("misses_if_served", {misses: 1.0, inside: -1.0, **served}, lower=-1.0)
                leaving[leaves] = 1.0
                hits |= hit
                # the penalties of earlier exits are already counted by their misses
                if wrong[trial, row]:
                    disagreements[leaves] = float(count[row])
            program.row("a_hit_leaves", {inside: 1.0, **hits}, upper=1.0)
            was = {} if before is None else {before: -1.0}
            now = 1.0 if before is None else 0.0
            program.row("inside_or_left", {inside: 1.0, **leaving, **was}, lower=now, upper=now)
            before = inside
    program.row("disagreements", disagreements, upper=float(budget))
    constant = program.variable("base", cost=instance.base_ms, lower=1.0)
    program.row("base_is_paid", {constant: 1.0}, lower=1.0, upper=1.0)
    return program, takes


def _add_limits(program: MixedIntegerProgram, instance: Instance, hit_by: Sequence[Sequence[int]]) -> None:
    serves = {trial: variables[0] for trial, variables in enumerate(hit_by) if variables}
    for block in np.unique(instance.block):
        at_block = {variable: 1.0 for trial, variable in serves.items() if instance.block[trial] == block}
        program.row(f"one_at_block_{block}", at_block, upper=1.0)
    if instance.memory_limit_bytes is not None:
        sizes = instance.memory_bytes / BYTES_PER_UNIT
        memory = {variable: float(sizes[trial]) for trial, variable in serves.items()}
        program.row("memory", memory, upper=instance.memory_limit_bytes / BYTES_PER_UNIT)
    if instance.slowdown_limit_ms is not None:
        slowdown = {variable: float(instance.penalty_ms[trial]) for trial, variable in serves.items()}
        program.row("slowdown", slowdown, upper=instance.slowdown_limit_ms)
    for earlier, later in combinations(serves, 2):
        apart = instance.block[later] > instance.block[earlier]
        if apart and not instance.compatible(earlier, later):
            program.row("one_lookup_at_a_time", {serves[earlier]: 1.0, serves[later]: 1.0}, upper=1.0)


def _check(instance: Instance, chosen: Chosen, outcome: ReplayOutcome, budget: int, solver: str) -> None:
    if not instance.allows(chosen) or outcome.disagreements > budget + ROUNDING:
        raise SolverError(
            f"{solver} chose caches that break a limit ({outcome.disagreements:g} disagreements, "
            f"{budget} allowed); try another --solver and report this"
        )
