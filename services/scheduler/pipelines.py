"""Runs queries through a pipeline: the planner chooses an option for each stage, and its model answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gati.errors import DeadlineError, OverloadError, UnavailableError, one_line
from gati.pipelines import EngineReport, LivePlanner, Pipeline, Planner, Run
from gati.types import BASE
from services.scheduler.later import LaterStages
from services.scheduler.models import Model
from services.scheduler.replanning import Replanning
from services.scheduler.replicas import Asked
from services.scheduler.timing import Timing, in_services_ms

_log = logging.getLogger("gati.scheduler")


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
        self._later = LaterStages(planner)
        self.replanning = Replanning(planner, models) if isinstance(planner, LivePlanner) else None

    @property
    def models(self) -> tuple[Model, ...]:
        """All models that may answer."""
        return tuple(dict.fromkeys(self._models.values()))

    @property
    def first_models(self) -> tuple[Model, ...]:
        """The models that may answer the first stage."""
        first = self.pipeline.input
        return tuple(dict.fromkeys(each for (stage, _), each in self._models.items() if stage == first))

    @property
    def channels(self) -> int:
        """The number of channels of input images: 1 (grey) or 3 (colour; also while unknown)."""
        known = (int(model.info.image_shape[2]) for model in self.models if model.info is not None)
        return next(filter(None, known), 3)

    @property
    def ready(self) -> bool:
        """Whether every option is available."""
        return all(model.available for model in self.models)

    async def answer(
        self, tensor: Any, timing: Timing, place: str | None = None, outside_ms: float = 0.0
    ) -> PipelineAnswer:
        """Answer a query for one input, a `Tensor` of the wire; `place` is its source, such as a camera.

        `outside_ms` is the expected time from now apart from `foreseen_ms`. Cancellation cancels the
        stages in progress.

        **Raises:** `OverloadError` if the SLO cannot be met, before any stage has run; `DeadlineError` if the
        timeout passes between stages; and the errors of the models.
        """
        run = self.planner.begin(timing.latency_slo_ms or timing.timeout_ms, timing.elapsed_ms())
        answer = PipelineAnswer("")
        query = _Query(tensor, timing, place, outside_ms)
        running: set[asyncio.Task[dict[str, Any]]] = set()
        try:
            while not run.done:
                if len(run.ready) == 1 and not running:  # a single stage needs no task
                    answer.stages.append(await self._stage(run, run.ready[0], query))
                    continue
                running |= {asyncio.create_task(self._stage(run, name, query)) for name in run.ready}
                await asyncio.sleep(0)  # the tasks start, so their stages are no longer in `run.ready`
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                failed = [error for task in done if (error := task.exception()) is not None]
                if failed:  # all were asked for theirs, or asyncio would log the others
                    raise failed[0]
                answer.stages += [task.result() for task in done]
        except (DeadlineError, OverloadError):
            if run.labels and timing.latency_slo_ms is not None:
                self._later.late()
            raise
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if timing.latency_slo_ms is not None and timing.elapsed_ms() > timing.latency_slo_ms:
            self._later.late()
        answer.label = run.answer or ""
        answer.skipped = [name for name in self.pipeline.stages if name in run.skipped]
        if self.replanning is not None:
            self.replanning.look()
        return answer

    def foreseen_ms(self, stages: Sequence[Mapping[str, Any]]) -> float:
        """The part of an answered query's time that admission foresees, from the reports of its stages.

        That is the time inside services and, for all stages but the first, also the way to them if the
        figures of the plan follow the traffic, because these include it.
        """
        if self.replanning is None:
            return in_services_ms(stages)
        first = self.pipeline.input
        return in_services_ms(
            each if each["stage"] == first else {**each, "service_ms": each["latency_ms"]} for each in stages
        )

    def close(self) -> None:
        """Stop replanning."""
        if self.replanning is not None:
            self.replanning.close()

    async def _stage(self, run: Run, name: str, query: _Query) -> dict[str, Any]:
        timing = query.timing
        started_ms = timing.elapsed_ms()
        if started_ms >= timing.timeout_ms:
            raise DeadlineError(f"the deadline passed before stage '{name}'")
        models = {option: self._models[name, option] for option in self.pipeline.stages[name].options}
        ready = [option for option, each in models.items() if each.ready]
        asleep = [option for option, each in models.items() if each.available and not each.ready]
        step = run.start(name, started_ms, ready or asleep, asleep)
        if step.wanted != step.option:
            models[step.wanted].wake()  # for later queries: this one does not wait
        response, waited_ms = None, 0.0
        if step.explores:
            response = await self._explored(models[step.option], query)
            if response is None:
                step = run.fall_back(name, timing.elapsed_ms())
                waited_ms = timing.elapsed_ms() - started_ms
        model = models[step.option]
        if response is None:
            response = await self._asked(model, query, admits=not (run.labels or waited_ms))
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
            "service_ms": response.latency_ms + waited_ms,
            "queue_ms": response.queue_ms + waited_ms,
            "budget_ms": step.budget_ms,
        }

    async def _asked(self, model: Model, query: _Query, *, admits: bool) -> Any:
        """Return the model's response; `admits` if the query may be refused because of its SLO.

        Only the first stage may do that: later refusals would waste earlier work.
        """
        timing = query.timing
        elapsed_ms = timing.elapsed_ms()
        if not admits or timing.latency_slo_ms is None:
            return await model.infer(query.tensor, query.asked(timing.timeout_ms - elapsed_ms))
        later_ms = self._later.least_ms
        slo_ms = timing.latency_slo_ms - elapsed_ms - query.outside_ms - later_ms
        try:
            response = await model.infer(query.tensor, query.asked(timing.timeout_ms - elapsed_ms, slo_ms))
        except OverloadError as error:
            self._later.refused()
            if slo_ms > 0.0 or later_ms == 0.0:
                raise
            raise OverloadError(
                f"{elapsed_ms:.1f} ms passed before the first stage, the way to it and back takes about "
                f"{query.outside_ms:.1f} ms, and the stages after '{self.pipeline.input}' take at least "
                f"{later_ms:.1f} ms: too long for the SLO of {timing.latency_slo_ms:.9g} ms",
                retry_after_s=error.retry_after_s,
            ) from error
        self._later.admitted()
        return response

    async def _explored(self, model: Model, query: _Query) -> Any:
        """Return the response of an explored option, or None if it does not answer in half the time left.

        The other half is for the planned option. It is not refused for the SLO, or an option that looks too
        slow could never be observed.
        """
        half_ms = (query.timing.timeout_ms - query.timing.elapsed_ms()) / 2
        try:
            async with asyncio.timeout(half_ms / 1e3):  # if the service hangs, `infer` waits for longer
                return await model.infer(query.tensor, query.asked(half_ms))
        except (DeadlineError, OverloadError, UnavailableError, TimeoutError) as error:
            _log.debug("an explored option did not answer", extra={"reason": one_line(error)})
            return None


class _Query(NamedTuple):
    """One query: its input, limits and place, and the expected time that admission does not foresee."""

    tensor: Any
    timing: Timing
    place: str | None
    outside_ms: float

    def asked(self, time_remaining_ms: float, latency_slo_ms: float | None = None) -> Asked:
        """The parameters of a stage's request."""
        timing = self.timing
        return Asked(time_remaining_ms, latency_slo_ms, timing.priority, timing.trace_id, self.place)
