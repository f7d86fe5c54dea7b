"""The time of a query outside the services; parallel stages count once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from services.config import ServeConfig
from services.scheduler.pipeline_routes import router
from services.scheduler.pipelines import PipelineAnswer
from services.scheduler.scheduler import Scheduler
from services.scheduler.timing import Timing, in_services_ms
from tests.services.running import png


def stage(started_ms: float, latency_ms: float, service_ms: float) -> dict[str, Any]:
    return {"started_ms": started_ms, "latency_ms": latency_ms, "service_ms": service_ms}


def test_stages_one_after_the_other_add_up() -> None:
    assert in_services_ms([stage(1.0, 10.0, 8.0), stage(12.0, 6.0, 5.0)]) == pytest.approx(13.0)


def test_stages_side_by_side_count_once() -> None:
    """Three services worked on a query of 22 ms for 20 ms each: 2 ms were spent outside, not minus 38."""
    stages = [stage(1.0, 20.0, 20.0) for _ in range(3)]
    assert 22.0 - in_services_ms(stages) == pytest.approx(2.0)


def test_a_fork_between_two_stages_takes_as_long_as_its_longer_side() -> None:
    fork = [stage(10.0, 30.0, 30.0), stage(10.0, 12.0, 12.0)]
    assert in_services_ms([stage(0.0, 10.0, 10.0), *fork, stage(45.0, 5.0, 5.0)]) == pytest.approx(45.0)


def test_no_stage_has_no_service() -> None:
    assert in_services_ms([]) == 0.0


def test_a_query_whose_stages_ran_side_by_side_never_takes_less_than_nothing_outside() -> None:
    """Below nothing, requests were let in that came too late."""

    asked = {"option": "small", "model": "small", "version": "default", "exit": "base"}

    class SideBySide:
        channels, default_slo_ms = 1, None
        planner = SimpleNamespace(policy="equal")

        async def answer(
            self, tensor: object, timing: Timing, place: str | None, outside_ms: float
        ) -> PipelineAnswer:
            await asyncio.sleep(0.02)
            return PipelineAnswer("north", [asked | stage(0.0, 20.0, 20.0) for _ in range(3)])

        def foreseen_ms(self, stages: list[dict[str, Any]]) -> float:
            return in_services_ms(stages)

    async def main() -> float:
        served: Any = SideBySide()
        scheduler = Scheduler(ServeConfig(), {}, {"sides": served})
        app = FastAPI()
        app.include_router(router)
        app.state.scheduler = scheduler
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            reply = await client.post("/v1/pipelines/sides/query", content=png())
        assert reply.status_code == 200, reply.text
        return scheduler.entrance("pipelines/sides").outside.value

    assert asyncio.run(main()) >= 0.0


times = st.floats(0.0, 1e4)


@given(st.lists(st.tuples(times, times, st.floats(0.0, 2e4)), min_size=1, max_size=6))
def test_services_never_took_longer_than_the_query(rows: list[tuple[float, float, float]]) -> None:
    """Not even where a service's own clock says more than passed here."""
    stages = [stage(*row) for row in rows]
    wall_ms = max(started + latency for started, latency, _ in rows)
    found = in_services_ms(stages)
    longest = max(min(latency, service) for _, latency, service in rows)
    assert longest - 1e-6 <= found <= wall_ms + 1e-6
    assert found <= sum(min(latency, service) for _, latency, service in rows) + 1e-6
