"""Policy `dynamic`: dynamic programming over the rest of the graph, with measured distributions.

**The problem.** For every stage, remaining time and finding of the previous stage, choose an option. The
choices maximize the expected worth of the answer, subject to the constraint that a query meets its SLO with
probability `attainment` or more. A right answer in time is worth 1. A late right answer is worth
`late_worth`, by default a half: with 1, only the constraint would keep queries in time; with 0, rare slow
requests would decide too much. Up to 0.1 % of it is given up to save time.

**The solution.** Meeting the SLO has a price q, and a millisecond a price c. The value of starting stage s
with remaining time t after finding f is

    V_s(t, f) = max over options o:  E over latency x, finding g and label of o after f [ V_next(t - x, g) ]

V consists of four numbers (see `gati.pipelines.tables`): worth W (multiplied by the option's accuracy),
accuracy, probability P to be in time, and expected busy time B. The maximum is that of W + q P - c B. There
is one such table for each pair of prices. When a query begins, it gets the best table with P >= attainment,
or the one with the largest P if there is none. A decision is then one look-up.

**Findings.** Inputs that a network answers with confidence are easy for the next network, too: they leave at
early exits, and even a small network is right. `gati pipeline measure` measures each confidence level of the
previous stage separately, and plans distinguish these levels. So large networks run where they help.

**Never worse than static.** The plans of policy `static`, fixed for the whole query, are evaluated in the
same way and compete with the tables, as do the choices of `equal` and `proportional`. If the static plan
reaches `attainment`, the chosen plan has at least its worth and its probability of a right answer. If no plan
reaches it, the chosen plan has at least the static plan's P.

**Exact** on the grid of remaining times, at each pair of prices, if no two stages run in parallel: for
chains, trees and diamonds of conditions. Where the slowest options take many times as long as the fastest,
tight SLOs have a finer grid of their own. This assumes that latencies and mistakes of two stages depend on
each other through findings only. Rounding never overstates P.

**Approximate** if branches run in parallel: each decides by the remaining time as if it alone delayed the
join, and findings are not used inside. W, P and B of these decisions are still computed with the maximum over
the branches, so the attainment holds there, too. Replacing the constraint by prices is also approximate:
plans between two neighbouring prices may be missed.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gati.pipelines import policies
from gati.pipelines.forks import Follow, follows
from gati.pipelines.pipeline import Finding, Option, Pipeline
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

DEFAULT_LATE_WORTH = 0.5
_TOLERANCE = 0.001  # worth that is given up to save time
_COLUMNS = 1024
_PARALLEL_COLUMNS = 256  # for parallel branches, which need matrices
_PRICES = (0.0, *np.geomspace(0.02, 20.0, 10).tolist(), 1e6)
_LATENCY_PRICES = (1e-6, 5e-4, 2e-3)
_SLOW, _NEARLY_ALL = 0.95, 0.999  # shares of latencies
_FAR_ABOVE = 8.0  # times the usual latencies
_FINER = 8.0  # times finer is the next grid
_FEWEST_CELLS = 64  # of an SLO of twice the fastest answer; with fewer, there is a finer grid
_MOST_GRIDS = 4
_SURE = 1e-9  # tolerance for rounding errors of probabilities
_ALIKE = 1e-6  # tolerance for probabilities and ms: figures of the same traffic may differ by decay


class Forecast(NamedTuple):
    """The forecast for a query with a certain SLO, before it begins.

    `worth` is the probability of a right answer, where late ones count less; `accuracy` is the probability of
    a right answer, in time or late; `attainment` that of an answer in time, right or wrong; `busy_ms` the
    expected time of all stages together.
    """

    worth: float
    accuracy: float
    attainment: float
    busy_ms: float


_Table = dict[Key, "array[int]"]  # the index of the option, at each column


class _Entry(NamedTuple):
    option: str
    part: float  # share of the remaining time; the rest is for later stages


class DynamicPolicy:
    """Tables for every stage, remaining time and finding; see the module.

    Building them takes one or two seconds for three stages with six options, and over ten seconds for ten
    with five, if their behaviours after each finding were measured; and as long again for each finer grid, at
    most three.

    `columns` is the number of distinct remaining times; by default 1024, or 256 with parallel branches.

    **Raises:** `PipelineError` if parallel branches share stages, or do not meet in one stage.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        attainment: float,
        *,
        late_worth: float = DEFAULT_LATE_WORTH,
        columns: int | None = None,
    ) -> None:
        following = follows(pipeline)
        parallel = any(follow.join is not None for several in following.values() for follow in several)
        columns = columns or (_PARALLEL_COLUMNS if parallel else _COLUMNS)
        self._entries = _entries(pipeline, attainment)
        self._scales = [
            _Scale(pipeline, following, attainment, late_worth, longest_ms, columns)
            for longest_ms in _spans_ms(pipeline, columns)
        ]

    def begin(self, latency_slo_ms: float) -> _DynamicPlan:
        """Return a plan with the table for this SLO."""
        scale = self._scale_of(latency_slo_ms)
        return _DynamicPlan(scale.table_of(latency_slo_ms), self._entries, scale.cell_ms, scale.columns)

    def forecast(self, latency_slo_ms: float) -> Forecast:
        """The forecast for a query with this SLO."""
        return self._scale_of(latency_slo_ms).forecast(latency_slo_ms)

    def _scale_of(self, latency_slo_ms: float) -> _Scale:
        """The finest that reaches this SLO; else the coarsest, whose last column stands for all beyond it."""
        reaching = (scale for scale in self._scales if latency_slo_ms <= scale.longest_ms)
        return next(reaching, self._scales[-1])


class _Scale:
    """Tables on one grid, for SLOs up to `longest_ms`, and the best of them at each column."""

    def __init__(
        self,
        pipeline: Pipeline,
        following: Mapping[str, tuple[Follow, ...]],
        attainment: float,
        late_worth: float,
        longest_ms: float,
        columns: int,
    ) -> None:
        self.longest_ms = longest_ms
        self.columns = columns
        self.cell_ms = longest_ms * 1.02 / (columns - 1)
        grid = Grid(pipeline, following, self.cell_ms, columns, late_worth)
        static, plans = self._static_plans(pipeline, attainment)
        tables = [ValueTable(grid, given=plan) for plan in plans]
        for split in (policies.equal, policies.proportional):
            tables.append(ValueTable(grid, given=self._choices_of(pipeline, split(pipeline, attainment))))
        tables += [ValueTable(grid, price, cost) for price in _PRICES for cost in _LATENCY_PRICES]
        values = np.stack([table.values[pipeline.input, None] for table in tables])  # [tables, 4, columns]
        self._taken = _take(values, static, attainment)
        self._forecasts = values[self._taken, :, np.arange(columns)]  # [columns, 4]
        self._tables: dict[int, _Table] = {
            int(taken): {
                key: array("H", choice.astype(np.uint16).tobytes())  # faster look-ups than with numpy
                for key, choice in tables[taken].choices.items()
            }
            for taken in np.unique(self._taken)
        }

    def table_of(self, latency_slo_ms: float) -> _Table:
        """The table for this SLO."""
        return self._tables[int(self._taken[column_of(latency_slo_ms, self.cell_ms, self.columns)])]

    def forecast(self, latency_slo_ms: float) -> Forecast:
        """The forecast for a query with this SLO."""
        return Forecast(*self._forecasts[column_of(latency_slo_ms, self.cell_ms, self.columns)].tolist())

    def _static_plans(
        self, pipeline: Pipeline, attainment: float
    ) -> tuple[npt.NDArray[np.intp], list[Choices]]:
        """The index of the plan of policy `static` at each column, and the distinct plans."""
        static = policies.StaticPolicy(pipeline, attainment)
        # the largest time of each column
        slos_ms = (np.arange(self.columns, dtype=np.float64) + 1 - 1e-6) * self.cell_ms
        chosen = [static.positions(stage, slos_ms) for stage in pipeline.stages.values()]
        plans, at_column = np.unique(np.stack(chosen, axis=1), axis=0, return_inverse=True)
        fixed: list[Choices] = [
            {name: np.full(self.columns, place) for name, place in zip(pipeline.stages, plan, strict=True)}
            for plan in plans
        ]
        return at_column.ravel(), fixed

    def _choices_of(self, pipeline: Pipeline, policy: policies.SplitPolicy) -> Choices:
        """The choices, at each column, of a policy that depends on the remaining time only."""
        left_ms = (np.arange(self.columns, dtype=np.float64) - 1) * self.cell_ms
        return {name: policy.positions(stage, left_ms) for name, stage in pipeline.stages.items()}


class _DynamicPlan(NamedTuple):
    """The plan of one query. Budgets leave later stages the share of time of their fastest options."""

    table: _Table
    entries: dict[str, list[_Entry]]
    cell_ms: float
    columns: int

    def choose(self, stage: str, remaining_ms: float, finding: Finding | None = None) -> policies.Choice:
        """Look the choice up."""
        choices = self.table.get((stage, finding)) or self.table[stage, None]
        place = choices[column_of(remaining_ms, self.cell_ms, self.columns)]
        option, part = self.entries[stage][place]
        return policies.Choice(option, max(remaining_ms, 0.0) * part)


def _spans_ms(pipeline: Pipeline, columns: int) -> list[float]:
    """The longest remaining time of each grid, the shortest first.

    On a single grid, a tight SLO would have few cells if the slowest options take much longer: latencies that
    are rounded up to whole cells would no longer fit into it.
    """
    fastest = {
        name: min(option.measured_latency.mean_ms for option in stage.options.values())
        for name, stage in pipeline.stages.items()
    }
    tight_ms = 2.0 * policies.longest(pipeline, fastest)[1][pipeline.input]
    spans = [_longest_ms(pipeline)]
    # a finer grid that does not reach tight_ms is not worth its time
    while len(spans) < _MOST_GRIDS and max(columns / _FEWEST_CELLS, _FINER) * tight_ms < spans[0]:
        spans.insert(0, spans[0] / _FINER)
    return spans


def _longest_ms(pipeline: Pipeline) -> float:
    """The longest remaining time that plans distinguish: that of nearly all queries with the slowest options.

    Rare latencies far above the usual ones do not count, such as that of one query that waited for a start:
    otherwise the grid would be too coarse for all others.
    """
    nearly_all, usual = (
        policies.longest(
            pipeline,
            {
                name: max(of(option) for option in stage.options.values())
                for name, stage in pipeline.stages.items()
            },
        )[1][pipeline.input]
        for of in (lambda option: option.measured_latency.quantile_ms(_NEARLY_ALL), _usual_ms)
    )
    return min(nearly_all, _FAR_ABOVE * usual)


def _usual_ms(option: Option) -> float:
    """The latency of a slow request that waits as long as most do."""
    waiting = 0.0 if option.overhead is None else option.overhead.quantile_ms(0.5)
    return waiting + option.network_latency.quantile_ms(_SLOW)


def _entries(pipeline: Pipeline, attainment: float) -> dict[str, list[_Entry]]:
    """By stage: each option, with its budget as a share of the remaining time."""
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


def _take(values: Array, static: npt.NDArray[np.intp], attainment: float) -> npt.NDArray[np.intp]:
    """The table for each column of [tables, 4, columns]; `static` [columns]: tables of the static plans."""
    worth, right, in_time, busy = values[:, [WORTH, RIGHT, IN_TIME, BUSY]].transpose(1, 0, 2)
    every = np.arange(static.size)
    enough = in_time >= attainment - _SURE
    as_good = (right >= right[static, every] - _SURE) & (worth >= worth[static, every] - _SURE)
    enough &= as_good | ~enough[static, every]
    best = np.where(enough, worth, -np.inf).max(axis=0)
    good = enough & (worth >= best - _TOLERANCE)
    taken = np.where(good, busy, np.inf).argmin(axis=0)
    taken = np.where(enough.any(axis=0), taken, _greatest(in_time, worth, -busy))
    late = in_time.max(axis=0) < _SURE  # too late with any choice, so finish early
    found: npt.NDArray[np.intp] = np.where(late, _greatest(-busy, worth), taken)
    return found


def _greatest(*measures: Array) -> npt.NDArray[np.intp]:
    """For each column, the table with the greatest first measure; ties are broken by the next measures."""
    among = np.ones(measures[0].shape, dtype=bool)
    for measure in measures:
        among &= measure >= np.where(among, measure, -np.inf).max(axis=0) - _ALIKE
    first: npt.NDArray[np.intp] = among.argmax(axis=0)
    return first


@policies.register_policy("dynamic")
def dynamic(pipeline: Pipeline, attainment: float) -> policies.Policy:
    """The policy of this module, with its defaults."""
    return DynamicPolicy(pipeline, attainment)
