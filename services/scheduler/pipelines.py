"""Runs queries through a pipeline: the planner chooses an option for each stage, and its model answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gati.errors import DeadlineError
from gati.pipelines import EngineReport, LivePlanner, Pipeline, Planner, Run, Stage
from gati.pipelines.check import outcomes
from gati.types import BASE
from services.scheduler.models import Model
from services.scheduler.replanning import Replanning
from services.scheduler.replicas import Asked
from services.scheduler.timing import Timing


@dataclass
class PipelineAnswer:
    """The answer to a query, and a report of each stage."""

    label: str
    stages: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


class ServedPipeline:
    """A measured pipeline, its planner, and the model that serves each option.

    `models` maps stage and option to the model that serves it. A live planner gets the times of every stage,
    and replans in the background.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        planner: Planner | LivePlanner,
        models: Mapping[tuple[str, str], Model],
        default_slo_ms: float | None,
    ) -> None:
        self.pipeline = pipeline
        self.planner = planner
        self.default_slo_ms = default_slo_ms
        self._models = models
        self._least_after_ms: tuple[Pipeline | None, dict[str, float]] = (None, {})
        self.replanning = Replanning(planner, models) if isinstance(planner, LivePlanner) else None

    @property
    def models(self) -> tuple[Model, ...]:
        """All models that may answer."""
        return tuple(dict.fromkeys(self._models.values()))

    @property
    def channels(self) -> int:
        """The number of channels of input images: 1 (grey) or 3 (colour; also while unknown)."""
        model = self.models[0]
        return int(model.info.image_shape[2] or 3) if model.info is not None else 3

    @property
    def ready(self) -> bool:
        """Whether every option is available."""
        return all(model.available for model in self.models)

    async def answer(self, tensor: Any, timing: Timing, place: str | None = None) -> PipelineAnswer:
        """Answer a query for one input, a `Tensor` of the wire; `place` is its source, such as a camera.

        Cancellation cancels the stages in progress.

        **Raises:** `DeadlineError` if the timeout passes between stages, and the errors of the models.
        """
        run = self.planner.begin(timing.latency_slo_ms or timing.timeout_ms, timing.elapsed_ms())
        answer = PipelineAnswer("")
        running: set[asyncio.Task[dict[str, Any]]] = set()
        try:
            while not run.done:
                if len(run.ready) == 1 and not running:  # a single stage needs no task
                    answer.stages.append(await self._stage(run, run.ready[0], tensor, timing, place))
                    continue
                running |= {
                    asyncio.create_task(self._stage(run, name, tensor, timing, place)) for name in run.ready
                }
                await asyncio.sleep(0)  # the tasks start, so their stages are no longer in `run.ready`
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                failed = [error for task in done if (error := task.exception()) is not None]
                if failed:  # all were asked for theirs, or asyncio would log the others
                    raise failed[0]
                answer.stages += [task.result() for task in done]
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        answer.label = run.answer or ""
        answer.skipped = [name for name in self.pipeline.stages if name in run.skipped]
        if self.replanning is not None:
            self.replanning.look()
        return answer

    def close(self) -> None:
        """Stop replanning."""
        if self.replanning is not None:
            self.replanning.close()

    async def _stage(
        self, run: Run, name: str, tensor: Any, timing: Timing, place: str | None
    ) -> dict[str, Any]:
        started_ms = timing.elapsed_ms()
        if started_ms >= timing.timeout_ms:
            raise DeadlineError(f"the deadline passed before stage '{name}'")
        models = {option: self._models[name, option] for option in self.pipeline.stages[name].options}
        ready = [option for option, each in models.items() if each.ready]
        asleep = [option for option, each in models.items() if each.available and not each.ready]
        step = run.start(name, started_ms, ready or asleep, asleep)
        model = models[step.option]
        if step.wanted != step.option:
            models[step.wanted].wake()  # for later queries: this one does not wait
        slo_ms = None
        if timing.latency_slo_ms is not None and not run.labels:
            # Only the first stage may be refused because of the SLO: later refusals would waste earlier work.
            slo_ms = step.remaining_ms - self._least_after(name)
        asked = Asked(timing.timeout_ms - started_ms, slo_ms, timing.priority, timing.trace_id, place)
        response = await model.infer(tensor, asked)
        ended_ms = timing.elapsed_ms()
        first = response.answers[0]
        stage = self.pipeline.stages[name]
        found = stage.options[step.option].label(np.frombuffer(first.probabilities, "<f4"))
        served = EngineReport(response.latency_ms - response.queue_ms, response.queue_ms, first.exit)
        run.finish(name, found.label, ended_ms, found.confidence, served)
        return {
            "stage": name,
            "option": step.option,
            "model": model.name,
            "version": response.version,
            "label": found.label,
            "probability": found.probability,
            "exit": first.exit,
            "from_cache": first.exit != BASE,
            "started_ms": started_ms,
            "latency_ms": ended_ms - started_ms,
            "service_ms": response.latency_ms,
            "queue_ms": response.queue_ms,
            "budget_ms": step.budget_ms,
        }

    def _least_after(self, name: str) -> float:
        """Return the least time in ms of the stages after `name`, by the current figures."""
        planned, least = self._least_after_ms
        if planned is not self.planner.pipeline:
            planned = self.planner.pipeline
            least = _least_after_ms(planned)
            self._least_after_ms = (planned, least)
        return least[name]


def _least_after_ms(pipeline: Pipeline) -> dict[str, float]:
    """Return the least time in ms after each stage: its quickest outcome, with the fastest options.

    Of the stages that follow one outcome, the slowest counts, because all of them run.
    """
    after: dict[str, float] = {}
    for name in reversed(list(pipeline.stages)):
        after[name] = min(
            max((_least_ms(pipeline.stages[each]) + after[each] for each in targets), default=0.0)
            for targets in outcomes(pipeline.stages[name], pipeline.edges_from[name])
        )
    return after


def _least_ms(stage: Stage) -> float:
    return min(option.measured_latency.mean_ms for option in stage.options.values())
