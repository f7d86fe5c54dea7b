"""Policy `dynamic`: dynamic programming over the rest of the graph, with measured distributions.

**The problem.** For every stage, remaining time and finding of the stage before, choose an option so that
the expected worth of the answer is greatest, among all choices with which a query meets its SLO with
probability `attainment` or more. A right answer in time is worth 1, a late one `late_worth`, by default
a half: with 1 nothing but the constraint keeps queries in time, with 0 a rare slow request decides too much.
Up to `tolerance` of the worth is given up where it saves time.

**The solution.** With a price q on meeting the SLO and c on a millisecond, the value of starting stage s
with remaining time t after finding f is

    V_s(t, f) = max over options o:  E over latency x, finding g and label of o after f [ V_next(t - x, g) ]

where V keeps four numbers (see `gati.pipelines.tables`): worth W (the option's accuracy multiplies it),
accuracy, probability P to be in time, and expected busy time B; the maximum is of W + q P - c B. One such
table for each pair of prices; when a query begins, the best of those with P >= attainment is taken, or the
one with the largest P where none has that. A decision is then one look-up.

**Findings.** Inputs that a network answers with confidence are easy for the next one, too: they leave early
and even a small network is right. What `gati pipeline measure` measured apart for each level of confidence of
the stage before is planned apart, and the large networks run where they help.

**Never worse than static.** The plans of policy `static`, fixed for the whole query, are evaluated the same
way and are available next to the tables, as do the choices of `equal` and `proportional`. Where the static
plan reaches `attainment`, what is taken has at least its worth and its probability of a right answer; where
nothing reaches it, at least its P.

**Exact** on the grid of remaining times, at each pair of prices, where no two stages run in parallel:
chains, trees and diamonds of conditions, if latencies and mistakes of two stages depend on each other through
findings only. Rounding never overstates P. **Approximate** where branches run in parallel: each decides by
the time left as if it alone delayed the join, and findings are not used inside. What W, P and B then are is
still computed with the maximum over the branches, so the attainment holds there, too. Approximate, too, is
the step from prices to the constraint: what lies between two neighbouring prices may be missed.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gati.pipelines import policies
from gati.pipelines.forks import follows
from gati.pipelines.pipeline import Finding, Pipeline
from gati.pipelines.tables import (
    BUSY,
    IN_TIME,
    RIGHT,
    WORTH,
    Array,
    Choices,
    Grid,
    Key,
    ValueTable,
    column_of,
)

DEFAULT_TOLERANCE = 0.001
DEFAULT_LATE_WORTH = 0.5
_COLUMNS = 1024
_PARALLEL_COLUMNS = 256  # for parallel branches, which need matrices
_PRICES = (0.0, *np.geomspace(0.02, 20.0, 10).tolist(), 1e6)
_LATENCY_PRICES = (1e-6, 5e-4, 2e-3)
_SURE = 1e-9  # rounding errors of probabilities
_ALIKE = 1e-6  # tolerance for probabilities and ms; decayed figures of the same traffic differ by this much


class Forecast(NamedTuple):
    """The forecast for a query with some SLO, before it begins.

    `worth` is the probability of a right answer, late ones counted less, `accuracy` that of any right answer,
    `attainment` that of any answer in time, `busy_ms` the time of all stages together.
    """

    worth: float
    accuracy: float
    attainment: float
    busy_ms: float


_Table = dict[Key, "array[int]"]  # the position of the option, at each column


class _Entry(NamedTuple):
    option: str
    part: float  # share of the remaining time; the rest is for later stages


class DynamicPolicy:
    """Tables for every stage, remaining time and finding; see the module. Building them takes a second or so.

    `columns` is the number of distinct remaining times; by default 1024, or 256 with parallel branches.

    **Raises:** `PipelineError` for parallel branches that do not meet in one stage, or share stages.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        attainment: float,
        *,
        late_worth: float = DEFAULT_LATE_WORTH,
        tolerance: float = DEFAULT_TOLERANCE,
        columns: int | None = None,
    ) -> None:
        following = follows(pipeline)
        parallel = any(follow.join is not None for several in following.values() for follow in several)
        self._columns = columns or (_PARALLEL_COLUMNS if parallel else _COLUMNS)
        slowest = {
            name: max(option.measured_latency.quantile_ms(0.999) for option in stage.options.values())
            for name, stage in pipeline.stages.items()
        }
        self._cell_ms = policies.longest(pipeline, slowest)[1][pipeline.input] * 1.02 / (self._columns - 1)
        grid = Grid(pipeline, following, self._cell_ms, self._columns, late_worth)
        static, plans = self._static_plans(pipeline, attainment)
        tables = [ValueTable(grid, given=plan) for plan in plans]
        for split in (policies.equal, policies.proportional):
            tables.append(ValueTable(grid, given=self._choices_of(pipeline, split(pipeline, attainment))))
        tables += [ValueTable(grid, price, cost) for price in _PRICES for cost in _LATENCY_PRICES]
        values = np.stack([table.values[pipeline.input, None] for table in tables])  # [tables, 4, columns]
        self._taken = _take(values, static, attainment, tolerance)
        self._forecasts = values[self._taken, :, np.arange(self._columns)]  # [columns, 4]
        self._entries = _entries(pipeline, attainment)
        self._tables: dict[int, _Table] = {
            int(taken): {
                key: array("H", choice.astype(np.uint16).tobytes())  # faster look-ups than with numpy
                for key, choice in tables[taken].choices.items()
            }
            for taken in np.unique(self._taken)
        }

    def begin(self, latency_slo_ms: float) -> _DynamicPlan:
        """Take the table for this SLO."""
        column = column_of(latency_slo_ms, self._cell_ms, self._columns)
        table = self._tables[int(self._taken[column])]
        return _DynamicPlan(table, self._entries, self._cell_ms, self._columns)

    def forecast(self, latency_slo_ms: float) -> Forecast:
        """The forecast for a query with this SLO."""
        return Forecast(*self._forecasts[column_of(latency_slo_ms, self._cell_ms, self._columns)].tolist())

    def _static_plans(
        self, pipeline: Pipeline, attainment: float
    ) -> tuple[npt.NDArray[np.intp], list[Choices]]:
        """Every plan that policy `static` makes for some SLO, and which one for each column."""
        static = policies.StaticPolicy(pipeline, attainment)
        # the most time that has each column
        slos_ms = (np.arange(self._columns, dtype=np.float64) + 1 - 1e-6) * self._cell_ms
        chosen = [static.positions(stage, slos_ms) for stage in pipeline.stages.values()]
        plans, at_column = np.unique(np.stack(chosen, axis=1), axis=0, return_inverse=True)
        fixed: list[Choices] = [
            {name: np.full(self._columns, place) for name, place in zip(pipeline.stages, plan, strict=True)}
            for plan in plans
        ]
        return at_column.ravel(), fixed

    def _choices_of(self, pipeline: Pipeline, policy: policies.SplitPolicy) -> Choices:
        """The choice at each column of a policy that depends on the remaining time only."""
        left_ms = (np.arange(self._columns, dtype=np.float64) - 1) * self._cell_ms
        return {name: policy.positions(stage, left_ms) for name, stage in pipeline.stages.items()}


class _DynamicPlan(NamedTuple):
    """One query's table. A budget leaves later stages the share of time of their fastest options."""

    table: _Table
    entries: dict[str, list[_Entry]]
    cell_ms: float
    columns: int

    def choose(self, stage: str, remaining_ms: float, finding: Finding | None = None) -> policies.Choice:
        """One look-up."""
        choices = self.table.get((stage, finding)) or self.table[stage, None]
        place = choices[column_of(remaining_ms, self.cell_ms, self.columns)]
        option, part = self.entries[stage][place]
        return policies.Choice(option, max(remaining_ms, 0.0) * part)


def _entries(pipeline: Pipeline, attainment: float) -> dict[str, list[_Entry]]:
    """By stage and option: what its budget is of the remaining time."""
    needs = {
        name: [option.measured_latency.quantile_ms(attainment) for option in stage.options.values()]
        for name, stage in pipeline.stages.items()
    }
    fastest = {name: min(values) for name, values in needs.items()}
    onward = policies.longest(pipeline, fastest)[1]
    return {
        name: [
            _Entry(option, need / (need + onward[name] - fastest[name]))
            for option, need in zip(stage.options, needs[name], strict=True)
        ]
        for name, stage in pipeline.stages.items()
    }


def _take(
    values: Array, static: npt.NDArray[np.intp], attainment: float, tolerance: float
) -> npt.NDArray[np.intp]:
    """The table to take for each column of [tables, 4, columns]; `static` is what a static plan would be."""
    worth, right, in_time, busy = values[:, [WORTH, RIGHT, IN_TIME, BUSY]].transpose(1, 0, 2)
    every = np.arange(static.size)
    enough = in_time >= attainment - _SURE
    as_good = (right >= right[static, every] - _SURE) & (worth >= worth[static, every] - _SURE)
    enough &= as_good | ~enough[static, every]
    best = np.where(enough, worth, -np.inf).max(axis=0)
    good = enough & (worth >= best - tolerance)
    taken = np.where(good, busy, np.inf).argmin(axis=0)
    taken = np.where(enough.any(axis=0), taken, _greatest(in_time, worth, -busy))
    late = in_time.max(axis=0) < _SURE  # with any choice, so finish early
    found: npt.NDArray[np.intp] = np.where(late, _greatest(-busy, worth), taken)
    return found


def _greatest(*measures: Array) -> npt.NDArray[np.intp]:
    """The table with the greatest first measure for each column; of those alike, with the greatest second."""
    among = np.ones(measures[0].shape, dtype=bool)
    for measure in measures:
        among &= measure >= np.where(among, measure, -np.inf).max(axis=0) - _ALIKE
    first: npt.NDArray[np.intp] = among.argmax(axis=0)
    return first


@policies.register_policy("dynamic")
def dynamic(pipeline: Pipeline, attainment: float) -> policies.Policy:
    """The policy of this module, with its defaults."""
    return DynamicPolicy(pipeline, attainment)
