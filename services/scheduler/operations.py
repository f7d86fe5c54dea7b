"""Routes for operators: versions, statistics and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from gati.errors import ConfigError, GatiError, RequestError
from services.scheduler import documents
from services.scheduler.adapting import adaptation_status
from services.scheduler.bodies import read_body
from services.scheduler.models import Model
from services.scheduler.parameters import check_names
from services.scheduler.protocol import json_object
from services.scheduler.reasons import without_folders
from services.scheduler.replicas import Replica
from services.scheduler.scheduler import Scheduler, scheduler_of

router = APIRouter(tags=["operations"])

_LARGEST_BODY_BYTES = 65_536
_READY_TIMEOUT_S = 120.0


@router.get("/v1/adaptation", summary="How models adapt", responses=documents.SERVER)
async def adaptation(request: Request) -> dict[str, Any]:
    """Return every model's versions, the progress of their proofs, its memory, and results of retraining."""
    scheduler = scheduler_of(request)
    return await adaptation_status(scheduler.models, scheduler.background)


@router.post(
    "/v2/repository/index",
    summary="Models and versions",
    responses=documents.SERVER,
    openapi_extra=documents.INDEX_BODY,
)
async def index(request: Request) -> list[dict[str, Any]]:
    """Return every model with its versions and states."""
    scheduler = scheduler_of(request)
    only_ready = (await _document(request)).get("ready") is True
    rows: list[dict[str, Any]] = []
    for name, model in scheduler.models.items():
        if model.ready:
            rows += [
                {
                    "name": name,
                    "version": each.version,
                    "state": "READY",
                    "reason": f"waits to take over: {each.promise}" if each.pending else "",
                }
                for each in model.info.versions
            ]
        elif not only_ready:
            state = "LOADING" if model.wanted and not model.sleep.asleep else "UNAVAILABLE"
            rows.append({"name": name, "version": "", "state": state, "reason": without_folders(model.cause)})
    return rows


@router.post(
    "/v2/repository/models/{model}/load",
    summary="Load a version",
    responses=documents.LOAD,
    openapi_extra=documents.LOAD_BODY,
)
async def load(request: Request, model: str) -> dict[str, Any]:
    """Load a composition while the active version serves, and switch to it once it is warmed up.

    No request is dropped: those in progress are answered by the version they started with. A version
    without proof is `pending`: the previous one keeps serving until audits have proven it. Parameters:
    `composition`, from the model's cache library (default: the configured one), and `version`, the name of
    the new version (default: the composition, or `base`). An unloaded model is started first, and stays
    unloaded if it can never be served.
    """
    scheduler = scheduler_of(request)
    found = scheduler.model(model)
    parameters = await _parameters(request, ("composition", "version"))
    scheduler.refuse_when_draining()
    if found.wanted and found.all_hopeless:  # since an earlier attempt
        await found.stop(scheduler.config.drain_timeout_s)
    if not found.wanted:
        await found.start()
        try:
            await found.wait_until_ready(_READY_TIMEOUT_S)
        except ConfigError:
            if found.all_hopeless:
                await found.stop(scheduler.config.drain_timeout_s)
            else:  # another replica may still become ready
                found.stop_when_hopeless(scheduler.config.drain_timeout_s)
            raise
        if not parameters:
            return {"name": model, "version": found.active.version}
    own = scheduler.config.models.get(model)
    composition = parameters.get("composition", own.served_composition if own else None)
    version = parameters.get("version", composition or "base")
    with found.sleep.asked():
        await _awake(scheduler, found)
        await found.load(version, composition)
    loaded = found.version(version)
    return {
        "name": model,
        "version": version,
        "pending": bool(loaded.pending),
        "state": loaded.state,
        "promise": loaded.promise,
    }


@router.post(
    "/v2/repository/models/{model}/unload",
    summary="Unload a version, or a model",
    responses=documents.LOAD,
    openapi_extra=documents.UNLOAD_BODY,
)
async def unload(request: Request, model: str) -> dict[str, Any]:
    """Unload the version named in `parameters`, or stop the model's processes if none is named."""
    scheduler = scheduler_of(request)
    found = scheduler.model(model)
    version = (await _parameters(request, ("version", "unload_dependents"))).get("version")
    if version is not None:
        with found.sleep.asked():
            await _awake(scheduler, found)
            await found.unload(version)
    elif not found.supervised:
        raise RequestError(
            f"model '{model}' is not run by this server; stop it where it runs, or name a version"
        )
    elif found.wanted:
        await found.stop(scheduler.config.drain_timeout_s)
    return {"name": model, "version": version}


@router.get("/v2/models/stats", summary="Counts of all models", responses=documents.SERVER)
async def all_statistics(request: Request) -> dict[str, Any]:
    """Return the counts of every model that is ready."""
    models = scheduler_of(request).models
    found = await _statistics(scheduler_of(request), Model.statistics)
    return {"model_stats": [row for name, each in found.items() for row in _rows(models[name], each)]}


@router.get("/v2/models/{model}/stats", summary="Counts of a model", responses=documents.MODEL)
async def statistics(request: Request, model: str) -> dict[str, Any]:
    """Return the number of inputs answered since the process started, by version and exit."""
    found = scheduler_of(request).model(model)
    return {"model_stats": _rows(found, await found.statistics())}


@router.get(
    "/v2/models/{model}/versions/{version}/stats",
    summary="Counts of a version",
    responses=documents.MODEL,
)
async def version_statistics(request: Request, model: str, version: str) -> dict[str, Any]:
    """As the counts of a model, for a version that is loaded or has answered."""
    found = scheduler_of(request).model(model)
    rows = [row for row in _rows(found, await found.statistics()) if row["version"] == version]
    if not rows:
        found.version(version)  # raises `NotFoundError` if it is not loaded
    return {"model_stats": rows}


@router.get("/v1/models/{model}/replicas", summary="Replicas of a model", responses=documents.MODEL)
async def replicas(request: Request, model: str) -> dict[str, Any]:
    """Return the replicas that share a model's requests, with their states.

    `input_ms` is the time that each outstanding input adds to an answer, learned from earlier answers; null
    before the first.
    """
    found = scheduler_of(request).model(model)
    return {
        "name": model,
        "asked_again": found.dispatcher.asked_again,
        "replicas": [_replica(each) for each in found.replicas],
    }


@router.get("/metrics", summary="Metrics of all processes, for Prometheus", responses=documents.METRICS)
async def metrics(request: Request) -> Response:
    """Return counters, gauges and histograms. Prometheus computes the rates."""
    scheduler = scheduler_of(request)
    # Clients need no key for it, and it asks all services: requests that come meanwhile share the page.
    if scheduler.page is None or scheduler.page.done():
        scheduler.page = asyncio.create_task(_page(scheduler))
    return Response(await asyncio.shield(scheduler.page), media_type=CONTENT_TYPE_LATEST)


# --------------------------------------------------------------------------------------------------------


async def _awake(scheduler: Scheduler, model: Model) -> None:
    """Start a sleeping model. Raises `UnavailableError` or `ConfigError` if that fails, or while draining."""
    if model.sleep.asleep or model.sleep.waking:
        scheduler.refuse_when_draining()
        model.wake()
        await model.wait_until_ready(_READY_TIMEOUT_S)


async def _page(scheduler: Scheduler) -> bytes:
    """Return the page of metrics."""
    found = await _statistics(scheduler, Model.statistics_by_replica)
    return scheduler.metrics.render(found, scheduler.models, scheduler.pipelines)


async def _statistics(scheduler: Scheduler, ask: Callable[[Model], Awaitable[Any]]) -> dict[str, Any]:
    async def of(model: Model) -> Any:
        try:
            return await ask(model)
        except GatiError:  # the model stopped after it was found ready below
            return None

    models = {name: model for name, model in scheduler.models.items() if model.ready}
    found = await asyncio.gather(*map(of, models.values()))
    return {name: each for name, each in zip(models, found, strict=True) if each is not None}


def _rows(model: Model, found: Any) -> list[dict[str, Any]]:
    """Return statistics in the format of V2, one entry per version.

    Times and refusals are counted per model. The versions share the times by their answers, and the active
    version has the refusals, so that sums over all versions are right.
    """
    active = model.active.version
    versions: dict[str, dict[str, int]] = {active: {}}
    for row in found.exits:
        versions.setdefault(row.version, {})[row.exit] = row.hits
    counts = {version: sum(exits.values()) for version, exits in versions.items()}
    all_answers = sum(counts.values())

    def duration(version: str, sum_s: float) -> dict[str, int]:
        share = counts[version] / all_answers if all_answers else 0.0
        return {"count": counts[version], "ns": round(1e9 * sum_s * share)}

    queue_s, service_s = found.queue_seconds.sum_s, found.service_seconds.sum_s
    return [
        {
            "name": model.name,
            "version": version,
            "inference_count": counts[version],
            "execution_count": counts[version],
            "exits": exits,
            "inference_stats": {
                "success": duration(version, queue_s + service_s),
                "fail": {"count": sum(found.refused.values()) if version == active else 0, "ns": 0},
                "queue": duration(version, queue_s),
                "compute_infer": duration(version, service_s),
            },
        }
        for version, exits in versions.items()
    ]


def _replica(found: Replica) -> dict[str, Any]:
    each_s = found.load.seconds_an_input
    row = {
        "replica": found.number,
        "state": found.state,
        "version": found.active.version if found.ready else None,
        "outstanding_inputs": found.load.outstanding,
        "input_ms": None if each_s is None else 1e3 * each_s,
        "restarts": found.restarts,
    }
    return row if found.ready else {**row, "reason": without_folders(found.cause)}


async def _document(request: Request) -> dict[str, Any]:
    scheduler = scheduler_of(request)
    with scheduler.budget.open() as charge:
        body = await read_body(request, _LARGEST_BODY_BYTES, charge, scheduler.pool)
    return json_object(body) if body.strip() else {}


async def _parameters(request: Request, known: tuple[str, ...]) -> dict[str, Any]:
    parameters = (await _document(request)).get("parameters") or {}
    if not isinstance(parameters, dict):
        raise RequestError("`parameters` must be an object")
    check_names(parameters, known)
    for name, value in parameters.items():
        if not isinstance(value, bool if name == "unload_dependents" else str):
            kind = "true or false" if name == "unload_dependents" else "text"
            raise RequestError(f"parameter `{name}` must be {kind}")
    return parameters
