"""Policy `dynamic`: dynamic programming over the rest of the graph, with measured distributions.

**The problem.** For every stage and remaining time choose an option so that the probability of a right answer
in time is greatest, among all ways to choose under which a query meets its SLO with probability `attainment`
or more. (A late answer is worth `late_worth` of one in time: by default nothing, as services drop it.)

**The solution.** With a price `q` on meeting the SLO, the value of starting stage s with remaining time t is

    V_s(t) = max over options o:  E over latency x of o and the label it gives [ V_next(t - x) ]

where V keeps three numbers: worth W (the option's accuracy multiplies it), probability to be in time P, and
expected busy time B; the maximum is of W + q P - `_LATENCY_PRICE` B. One such table a price, from 0 to very
large; when a query begins, the table with the largest W among those with P >= attainment is taken, or the
one with the largest P where none has that. A decision is then one look-up.

**Never worse than static.** The plans of policy `static`, fixed for the whole query, are evaluated the same
way and stand for choice beside the tables. So for every SLO the value W of what is taken is at least that of
the static plan, if that reaches `attainment`; if nothing does, its P is at least that of the static plan.

**Exact** on the grid of remaining times where no two stages run in parallel: chains, trees and diamonds of
conditions, for options whose latencies and mistakes are independent between stages. Latencies are rounded
up to the grid and remaining time down, so P is never overstated by rounding. **Approximate** where branches
run in parallel: each decides by the time left as if it alone delayed the join. What W, P and B then are is
still computed with the maximum over the branches, so the attainment holds there, too.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gati.plan.forks import Follow, follows
from gati.plan.pipeline import Option, Pipeline
from gati.plan.policies import Choice, StaticPolicy, longest, register_policy

__all__ = ["CELLS", "DynamicPolicy", "Forecast"]

CELLS = 1024  # of the grid of remaining times
_PARALLEL_CELLS = 384  # where branches need matrices over it
_LATENCY_PRICE = 1e-6  # worth a millisecond: decides only between what is otherwise equal
_PRICES = (0.0, *np.geomspace(0.01, 100.0, 33).tolist(), 1e6)
_WORTH, _IN_TIME, _BUSY = range(3)

_Array = npt.NDArray[np.float64]
# A value is [3, cells + 1]: worth, in time, busy ms. Column 0 is "late", column j has j - 1 cells left.


class Forecast(NamedTuple):
    """What is expected of a query with some SLO.

    `worth` is the probability of a right answer in time, `attainment` that of any answer in time.
    """

    worth: float
    attainment: float
    busy_ms: float


class _OptionModel:
    """One option on the grid: `pmf[k]` is the probability that it takes k cells, rounded up."""

    def __init__(self, option: Option, cell_ms: float, cells: int, attainment: float) -> None:
        latency = option.measured_latency
        self.name = option.name
        self.accuracy = option.measured_accuracy
        self.mean_ms = latency.mean_ms
        self.quantile_ms = latency.quantile_ms(attainment)
        steps = np.ceil(np.asarray(latency.values_ms) / cell_ms - 1e-9).astype(np.int64).clip(1, cells + 1)
        self.pmf: _Array = np.bincount(steps, weights=latency.probabilities).astype(np.float64)

    def apply(self, value: _Array) -> _Array:
        """The value of running this option, when `value` is that of what follows."""
        result = np.stack([_spend(row, self.pmf) for row in value])
        result[_WORTH] *= self.accuracy
        result[_BUSY] += self.mean_ms
        return result


def _spend(row: _Array, pmf: _Array) -> _Array:
    """E[row at what is left] after a random number of cells; less than nothing is left is late, column 0."""
    most = len(pmf) - 1
    padded = np.concatenate([np.full(most, row[0]), row])
    return np.convolve(padded, pmf)[most : most + len(row)]


class _Model(NamedTuple):
    """All that tables are computed from."""

    pipeline: Pipeline
    options: dict[str, tuple[_OptionModel, ...]]
    follows: dict[str, tuple[Follow, ...]]
    cells: int
    late_worth: float


class _Table:
    """Choices and values of every stage, either the best at one price or fixed ones."""

    def __init__(self, model: _Model, price: float = 0.0, fixed: dict[str, int] | None = None) -> None:
        self._model = model
        self._price = price
        self._fixed = fixed
        self.choices: dict[str, npt.NDArray[np.intp]] = {}
        self.values: dict[str, _Array] = {}
        self._kernels: dict[tuple[str, str], tuple[_Array, _Array, _Array]] = {}
        answered = np.zeros((3, model.cells + 1))
        answered[_WORTH] = answered[_IN_TIME] = 1.0
        answered[:, 0] = (model.late_worth, 0.0, 0.0)
        self._answered = answered
        ends = _ends(model)
        for stage in reversed(list(model.pipeline.stages)):
            self._solve(stage, ends.get(stage))

    def _solve(self, stage: str, end: str | None) -> None:
        after = sum(
            (follow.share * self._value_of(follow, end) for follow in self._model.follows[stage]),
            np.zeros_like(self._answered),
        )
        options = np.stack([option.apply(after) for option in self._model.options[stage]])
        if self._fixed is not None:
            best = np.full(options.shape[2], self._fixed[stage], dtype=np.intp)
        else:
            worth, in_time, busy = options[:, _WORTH], options[:, _IN_TIME], options[:, _BUSY]
            best = (worth + self._price * in_time - _LATENCY_PRICE * busy).argmax(axis=0)
        self.choices[stage] = best
        self.values[stage] = np.take_along_axis(options, best[None, None, :], axis=0)[0]

    def _value_of(self, follow: Follow, end: str | None) -> _Array:
        """What comes after a stage, [3, cells + 1]; `end` is the join that a branch without more leads to."""
        if len(follow.targets) == 1:
            return self.values[follow.targets[0]]
        if follow.join is None:
            return self._answered if end is None else self.values[end]
        in_time, right, busy = self._parallel(follow)
        join = self.values[follow.join]
        return np.stack([right @ join[_WORTH], in_time @ join[_IN_TIME], in_time @ join[_BUSY] + busy])

    def _parallel(self, follow: Follow) -> tuple[_Array, _Array, _Array]:
        """From the start of parallel branches to their join, as `_kernel`: the last to arrive decides."""
        if follow.join is None:
            raise AssertionError("branches in parallel have a join")
        kernels = [self._kernel(target, follow.join) for target in follow.targets]
        in_time = _least([kernel[0] for kernel in kernels])
        right = _least([kernel[1] for kernel in kernels])
        return in_time, right, reduce(np.add, [kernel[2] for kernel in kernels])

    def _kernel(self, stage: str, join: str) -> tuple[_Array, _Array, _Array]:
        """From a stage to a join: column at arrival by column at start, twice, and the busy time between.

        The first matrix holds probabilities, the second those times the accuracy of what was chosen, so that
        accuracy and time of arrival stay together.
        """
        if stage == join:
            unit = np.eye(self._model.cells + 1)
            return unit, unit, np.zeros(self._model.cells + 1)
        if (stage, join) not in self._kernels:
            self._kernels[stage, join] = self._run_kernel(stage, join)
        return self._kernels[stage, join]

    def _run_kernel(self, stage: str, join: str) -> tuple[_Array, _Array, _Array]:
        size = self._model.cells + 1
        after = [np.zeros((size, size)), np.zeros((size, size)), np.zeros(size)]
        for follow in self._model.follows[stage]:
            for total, part in zip(after, self._kernel_of(follow, join), strict=True):
                total += follow.share * part
        reached, right, busy = (np.zeros_like(array) for array in after)
        for index, option in enumerate(self._model.options[stage]):
            rows = np.flatnonzero(self.choices[stage] == index)
            if rows.size:
                step = _transitions(option.pmf, size)[rows]
                reached[rows] = step @ after[0]
                right[rows] = option.accuracy * (step @ after[1])
                busy[rows] = option.mean_ms + step @ after[2]
        return reached, right, busy

    def _kernel_of(self, follow: Follow, join: str) -> tuple[_Array, _Array, _Array]:
        if not follow.targets:
            return self._kernel(join, join)
        if follow.join is None:
            return self._kernel(follow.targets[0], join)
        reached, right, busy = self._parallel(follow)
        onward = self._kernel(follow.join, join)
        return reached @ onward[0], right @ onward[1], busy + reached @ onward[2]


def _least(kernels: list[_Array]) -> _Array:
    """The distribution of the least of independent arrivals, row by row: products of the upper tails."""
    tails = [np.cumsum(kernel[:, ::-1], axis=1)[:, ::-1] for kernel in kernels]
    together: _Array = reduce(np.multiply, tails)
    return together - np.pad(together[:, 1:], ((0, 0), (0, 1)))


def _transitions(pmf: _Array, size: int) -> _Array:
    """[size, size]: the probability to come from one column to another by spending a random time."""
    matrix = np.zeros((size, size))
    for step, probability in enumerate(pmf):
        if probability > 0.0:
            start = np.arange(size)
            np.add.at(matrix, (start, np.maximum(start - step, 0)), probability)
    return matrix


def _ends(model: _Model) -> dict[str, str]:
    """The join that each stage inside a branch leads to when nothing more of its branch runs."""
    found: dict[str, str] = {}
    for follow in (follow for several in model.follows.values() for follow in several):
        pending = [target for target in follow.targets if follow.join is not None]
        while pending:
            name = pending.pop()
            if name != follow.join:
                found[name] = str(follow.join)  # in file order, so the innermost fork writes last
                pending += [edge.target for edge in model.pipeline.edges_from[name]]
    return found


@register_policy("dynamic")
class DynamicPolicy:
    """Tables for every stage, remaining time and price; see the module. Building them takes about a second.

    **Raises:** `PipelineError` for parallel branches that do not meet in one stage, or share stages.
    """

    def __init__(
        self, pipeline: Pipeline, attainment: float, *, late_worth: float = 0.0, cells: int | None = None
    ) -> None:
        following = follows(pipeline)
        parallel = any(follow.join is not None for several in following.values() for follow in several)
        size = cells or (_PARALLEL_CELLS if parallel else CELLS)
        slowest = {
            name: max(option.measured_latency.quantile_ms(0.999) for option in stage.options.values())
            for name, stage in pipeline.stages.items()
        }
        self._cell_ms = longest(pipeline, slowest)[1][pipeline.input] * 1.02 / size
        options = {
            name: tuple(
                _OptionModel(option, self._cell_ms, size, attainment) for option in stage.options.values()
            )
            for name, stage in pipeline.stages.items()
        }
        self._model = _Model(pipeline, options, following, size, late_worth)
        tables = [_Table(self._model, price) for price in _PRICES]
        tables += [_Table(self._model, fixed=fixed) for fixed in self._static_plans(attainment)]
        values = np.stack([table.values[pipeline.input] for table in tables])  # [tables, 3, columns]
        self._taken = _take(values, attainment)
        self._forecasts = values[self._taken, :, np.arange(size + 1)]  # [columns, 3]
        self._tables = self._look_up_tables(tables)

    def begin(self, latency_slo_ms: float) -> _DynamicPlan:
        """Take the table for this SLO."""
        table = self._tables[int(self._taken[self._column(latency_slo_ms)])]
        return _DynamicPlan(table, self._cell_ms, self._model.cells)

    def forecast(self, latency_slo_ms: float) -> Forecast:
        """What is expected of a query with this SLO, before it begins."""
        worth, in_time, busy_ms = self._forecasts[self._column(latency_slo_ms)].tolist()
        return Forecast(worth, in_time, busy_ms)

    def _column(self, remaining_ms: float) -> int:
        return _column(remaining_ms, self._cell_ms, self._model.cells)

    def _static_plans(self, attainment: float) -> list[dict[str, int]]:
        """Every plan that policy `static` makes for some SLO, as indices of options."""
        pipeline = self._model.pipeline
        static = StaticPolicy(pipeline, attainment)
        position = {
            name: {option: index for index, option in enumerate(stage.options)}
            for name, stage in pipeline.stages.items()
        }
        plans: dict[tuple[int, ...], dict[str, int]] = {}
        changes = static.changes_ms()
        for slo_ms in (changes[0] / 2, *(change * (1.0 + 1e-9) for change in changes)):
            choices = static.begin(slo_ms).choices
            plan = {name: position[name][choices[name].option] for name in pipeline.stages}
            plans[tuple(plan.values())] = plan
        return list(plans.values())

    def _look_up_tables(self, tables: list[_Table]) -> dict[int, dict[str, list[_Entry]]]:
        """Of the tables that some SLO takes: option and part of the remaining time, by stage and column."""
        by_stage = self._model.options.items()
        fastest = {name: min(option.quantile_ms for option in options) for name, options in by_stage}
        onward = longest(self._model.pipeline, fastest)[1]
        entries = {
            name: [
                _Entry(o.name, o.quantile_ms / (o.quantile_ms + onward[name] - fastest[name]))
                for o in options
            ]
            for name, options in by_stage
        }
        return {
            int(taken): {
                name: [entries[name][index] for index in choice.tolist()]
                for name, choice in tables[taken].choices.items()
            }
            for taken in np.unique(self._taken)
        }


class _Entry(NamedTuple):
    option: str
    part: float  # of the remaining time, the rest is for what follows


class _DynamicPlan(NamedTuple):
    """One query's table. A budget leaves what follows its fastest options' share of the time."""

    table: dict[str, list[_Entry]]
    cell_ms: float
    cells: int

    def choose(self, stage: str, remaining_ms: float) -> Choice:
        """One look-up."""
        option, part = self.table[stage][_column(remaining_ms, self.cell_ms, self.cells)]
        return Choice(option, max(remaining_ms, 0.0) * part)


def _column(remaining_ms: float, cell_ms: float, cells: int) -> int:
    """The column of a remaining time, rounded down; 0 when it is late."""
    return 0 if remaining_ms < 0.0 else min(int(remaining_ms / cell_ms + 1e-9), cells - 1) + 1


def _take(values: _Array, attainment: float) -> npt.NDArray[np.intp]:
    """The table to take for each column of [tables, 3, columns]."""
    worth, in_time, busy = values[:, _WORTH], values[:, _IN_TIME], values[:, _BUSY]
    enough = in_time >= attainment - 1e-12
    feasible = np.where(enough, worth - _LATENCY_PRICE * busy, -np.inf)
    careful = in_time + 1e-9 * worth - 1e-12 * busy
    best, safest = feasible.argmax(axis=0), careful.argmax(axis=0)
    return np.where(enough.any(axis=0), best, safest).astype(np.intp)
