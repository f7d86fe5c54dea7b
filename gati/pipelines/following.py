"""A planner whose figures follow the traffic: it plans with recent observations, not only offline ones.

    planner = LivePlanner(pipeline)
    run = planner.begin(latency_slo_ms=20.0)                       # as for `Planner`
    step = run.start(run.ready[0], elapsed_ms())
    ...                                                           # run the option's network
    run.finish(step.stage, label, elapsed_ms(), confidence, EngineReport(engine_ms, queue_ms, exit))
    if planner.due:
        planner.refresh()                                          # occasionally, in any thread

Observing costs microseconds. `refresh` makes a new plan, which takes as long as building a `Planner`, and
swaps it in atomically: running queries keep the plan they began with.

**Exploring.** An option that never runs is never observed, so its figures would never change again. Two
things prevent that. First, evidence decays with the queries of the stage, whichever option they ran, so the
offline figures return. Second, a query runs another option that `explore_every` queries of the stage have not
run, the oldest observation first, if its mean time fits into the remaining time; if it does not fit, the
option waits for four times as many queries. Such queries are at least `explore_every` apart. So an option
that became faster is discovered within a bounded number of queries, whatever the plan expects of it. Options
that cannot answer now are passed over; if only sleeping ones are due, one is woken for later queries. If the
explored option fails or takes too long, `Run.fall_back` runs the planned one instead.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from gati.errors import PipelineError
from gati.pipelines.changes import have_moved
from gati.pipelines.figures import (
    Agreement,
    Audits,
    LiveSettings,
    Observation,
    OptionFigures,
    StageFigures,
)
from gati.pipelines.pipeline import Pipeline
from gati.pipelines.planner import DEFAULT_ATTAINMENT, Planner, Run, times_to_answer

_LOOKS = 8  # checks per exploration interval while no option is due
_PATIENCE = 4  # options that do not fit are explored less often by this factor


class OptionReport(NamedTuple):
    """The figures with which one option is planned, and the evidence for them. Times are means.

    `evidence` is the weight of its observations in queries, `prior_share` the share of the offline figures.
    `way_ms` is the stage's transport time. Fields that need observations are None without any.
    """

    stage: str
    option: str
    latency_ms: float
    accuracy: float
    evidence: float
    prior_share: float
    engine_ms: float | None
    queue_ms: float | None
    way_ms: float | None
    hit_rate: float | None
    agreement: Agreement | None
    chosen: int
    explored: int


class LivePlanner:
    """Plans queries through one measured pipeline with figures that follow the traffic; see the module.

    Thread-safe. A `Run` belongs to one query.

    **Raises:** `PipelineError` as `Planner` does.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        policy: str = "dynamic",
        *,
        attainment: float = DEFAULT_ATTAINMENT,
        settings: LiveSettings | None = None,
    ) -> None:
        self.policy = policy
        self.attainment = attainment
        self.settings = settings or LiveSettings()
        self.replans = 0
        self._offline = pipeline
        self._planner = Planner(pipeline, policy, attainment=attainment)
        self._lock = threading.Lock()  # guards everything below
        self._refreshing = threading.Lock()
        self._figures = {name: StageFigures(stage, self.settings) for name, stage in pipeline.stages.items()}
        self._seen = 0  # queries since the last check of the figures
        self._audits: dict[tuple[str, str], Audits | None] = {}
        # Number of the query, by stage, at which to check again whether to explore.
        self._look_at = dict.fromkeys(pipeline.stages, self.settings.explore_every)
        self._needs = times_to_answer(pipeline)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline with the figures of the current plan."""
        return self._planner.pipeline

    @property
    def due(self) -> bool:
        """Whether there are enough observations to call `refresh`."""
        return self._seen >= self.settings.replan_every

    def begin(self, latency_slo_ms: float, elapsed_ms: float = 0.0) -> Run:
        """Begin a query, as `Planner.begin`. Raises `PipelineError`."""
        planner = self._planner
        plan = planner.plan(latency_slo_ms, elapsed_ms)
        explore = self._or_explore if self.settings.explore_every else None
        return Run(planner.pipeline, plan, latency_slo_ms, self._observe, explore)

    def refresh(self) -> bool:
        """Plan again if a figure has changed; returns whether one did. Observations go on meanwhile."""
        with self._refreshing:
            with self._lock:
                self._seen = 0
                figures = {name: each.copy() for name, each in self._figures.items()}
                agreements = self._agreements()
            stages = {name: each.stage(agreements[name]) for name, each in figures.items()}
            if not have_moved(self._planner.pipeline, stages, self.settings.tolerance):
                return False
            planner = Planner(replace(self._offline, stages=stages), self.policy, attainment=self.attainment)
            needs = times_to_answer(planner.pipeline)
            with self._lock:
                self._planner, self._needs = planner, needs
                self.replans += 1
            return True

    def certify(
        self, options: Iterable[tuple[str, str]], agreement: float | None, promised: float | None
    ) -> None:
        """Set the certificate of the model behind some options (stage, option), before its audits.

        `agreement` is the share of answers in the certificate's counts that equal the base model's, None
        without a certificate; `promised` is the promised share. Call it again for a new version: audits of
        the old one are forgotten. Raises `PipelineError` for an unknown option.
        """
        with self._lock:
            audits = None if agreement is None else Audits(agreement, promised, self.settings)
            for stage, option in options:
                self._of(stage, option)
                self._audits[stage, option] = audits
            self._seen += 1

    def audit(self, stage: str, option: str, *, agreed: int, lost: int) -> None:
        """Add audits of the model behind an option; they count for all options certified with it.

        Without a certificate, audits are not used. Raises `PipelineError` for an unknown option.
        """
        with self._lock:
            self._of(stage, option)
            audits = self._audits.get((stage, option))
            if audits is not None:
                audits.add(agreed, lost, self._time())
            self._seen += agreed + lost

    def report(self) -> list[OptionReport]:
        """The current figures of every option, stages in topological order."""
        found = []
        planned = self._planner.pipeline
        with self._lock:
            agreements = self._agreements()
            for name, figures in self._figures.items():
                for key, option in figures.options.items():
                    now = planned.stages[name].options[key]
                    found.append(
                        OptionReport(
                            name,
                            key,
                            now.measured_latency.mean_ms,
                            now.measured_accuracy,
                            option.evidence(figures.tick),
                            option.prior_share(figures.tick),
                            option.engine_ms(),
                            option.queue.mean_ms(),
                            figures.way.mean_ms(),
                            option.hit_rate(),
                            agreements[name].get(key),
                            option.chosen,
                            option.explored,
                        )
                    )
        return found

    # ----------------------------------------------------------------------------------------------------

    def _or_explore(
        self, stage: str, chosen: str, remaining_ms: float, usable: Collection[str], asleep: Collection[str]
    ) -> tuple[str, str]:
        """Return the option to run and the wanted one; see `Explore`."""
        figures = self._figures[stage]
        every = self.settings.explore_every
        if figures.tick < self._look_at[stage] or remaining_ms <= 0.0:
            return chosen, chosen
        with self._lock:
            if figures.tick < self._look_at[stage]:  # another thread has already explored
                return chosen, chosen
            stale = self._stale(stage, chosen, remaining_ms)
            run = next((name for name in stale if name in usable and name not in asleep), None)
            if run is not None:
                self._look_at[stage] = figures.tick + every
                figures.options[run].explored += 1
                figures.options[run].tried_tick = figures.tick
                return run, run
            self._look_at[stage] = figures.tick + max(1, every // _LOOKS)
            return chosen, next((name for name in stale if name in asleep), chosen)

    def _stale(self, stage: str, chosen: str, remaining_ms: float) -> list[str]:
        """The options other than the chosen one that are due to be observed, the oldest observation first."""
        figures = self._figures[stage]
        every = self.settings.explore_every
        found = []
        for name, each in figures.options.items():
            fits = self._needs[stage, name] <= remaining_ms
            unseen = figures.tick - max(each.last_tick, each.tried_tick)
            if name != chosen and unseen >= (every if fits else _PATIENCE * every):
                found.append((unseen, name))
        return [name for _, name in sorted(found, reverse=True)]

    def _observe(self, stage: str, seen: Observation) -> None:
        with self._lock:
            self._figures[stage].observe(seen)
            self._seen += 1

    def _time(self) -> int:
        """The time for audits: the number of queries of all stages."""
        return sum(figures.tick for figures in self._figures.values())

    def _agreements(self) -> dict[str, dict[str, Agreement | None]]:
        """The current agreements by stage and option; audits of a model pool its options' mistakes."""
        found: dict[str, dict[str, Agreement | None]] = {name: {} for name in self._figures}
        mistakes: dict[Audits, tuple[float, float]] = {}
        for (stage, option), audits in self._audits.items():
            if audits is not None:
                figures = self._figures[stage]
                likely, usual = figures.options[option].mistakes(figures.tick)
                before = mistakes.get(audits, (0.0, 0.0))
                mistakes[audits] = (before[0] + likely, before[1] + usual)
        for (stage, option), audits in self._audits.items():
            if audits is not None:
                likely, usual = mistakes[audits]
                found[stage][option] = audits.agreement(self._time(), likely / usual if usual > 0.0 else 1.0)
        return found

    def _of(self, stage: str, option: str) -> OptionFigures:
        try:
            return self._figures[stage].options[option]
        except KeyError:
            raise PipelineError(f"no stage '{stage}' with option '{option}'") from None
