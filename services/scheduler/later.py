"""How long the stages after the first one take at least: admission leaves a query that much of its SLO.

This follows from the figures of the current plan, which queries correct that run these stages. Refused ones
do not: after a stall of a later stage, figures alone would refuse all queries for good. Therefore they count
for less after many refusals in a row, until a query is late.
"""

from __future__ import annotations

from gati.pipelines import LivePlanner, Pipeline, Planner, Stage
from gati.pipelines.check import outcomes

_IN_A_ROW = 20  # refusals without an admitted query between them; with fewer, the figures are believed
_DOUBT = 0.9  # factor on the figures at each further one


class LaterStages:
    """The stages after the first one of a pipeline. Call its methods from one thread."""

    def __init__(self, planner: Planner | LivePlanner) -> None:
        self._planner = planner
        self._known: tuple[Pipeline | None, float] = (None, 0.0)
        self._refused = 0  # in a row
        self._trust = 1.0

    @property
    def least_ms(self) -> float:
        """The least time of a query after its first stage: its quickest outcome, with the fastest options."""
        planned, least_ms = self._known
        if planned is not self._planner.pipeline:
            planned = self._planner.pipeline
            least_ms = _least_after_ms(planned)[planned.input]
            self._known = (planned, least_ms)
        return self._trust * least_ms

    def refused(self) -> None:
        """Call when a query is refused for its SLO before it has run any stage."""
        self._refused += 1
        if self._refused > _IN_A_ROW:
            self._trust *= _DOUBT

    def admitted(self) -> None:
        """Call when the first stage has answered a query with an SLO."""
        self._refused = 0

    def late(self) -> None:
        """Call when a query with an SLO was late, or not answered, after its first stage."""
        self._trust = 1.0


def _least_after_ms(pipeline: Pipeline) -> dict[str, float]:
    """The least time in ms after each stage. Of the stages that follow one outcome, the slowest counts."""
    after: dict[str, float] = {}
    for name in reversed(list(pipeline.stages)):
        after[name] = min(
            max((_least_ms(pipeline.stages[each]) + after[each] for each in targets), default=0.0)
            for targets in outcomes(pipeline.stages[name], pipeline.edges_from[name])
        )
    return after


def _least_ms(stage: Stage) -> float:
    """The median of the fastest option: a mean would depend on a single query that waited for long."""
    return min(option.measured_latency.quantile_ms(0.5) for option in stage.options.values())
