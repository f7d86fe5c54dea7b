"""Routes of the Open Inference Protocol: metadata, readiness and inference of single models."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gati.errors import RequestError
from gati.types import BASE
from gati.version import __version__
from services.scheduler import documents
from services.scheduler.adapting import progress_of
from services.scheduler.bodies import unless_gone
from services.scheduler.entrance import Demand
from services.scheduler.models import Model
from services.scheduler.protocol import HEADER_LENGTH, render_response
from services.scheduler.reading import read_inference
from services.scheduler.reasons import without_folders
from services.scheduler.replies import BINARY, JSON, Json, Made
from services.scheduler.scheduler import scheduler_of
from services.scheduler.timing import Timing
from services.scheduler.tracing import called, trace_of
from services.wire.tensors import BYTES, inputs_in

router = APIRouter(tags=["models"])

_log = logging.getLogger("gati.rest")

_LENGTH = HEADER_LENGTH.lower().encode()
_EXTENSIONS = ["binary_tensor_data", "model_repository", "statistics"]


@router.get("/v2", summary="The server", responses=documents.SERVER)
async def server() -> dict[str, Any]:
    """Return name, version and extensions of the server."""
    return {"name": "gati", "version": __version__, "extensions": _EXTENSIONS}


@router.get("/v2/health/live", summary="Whether the scheduler runs")
async def live() -> dict[str, bool]:
    """Return `live`, which is true whenever the server can reply."""
    return {"live": True}


@router.get("/v2/health/ready", summary="Whether everything answers", responses=documents.READY)
async def ready(request: Request) -> Response:
    """200 if all models except unloaded ones are ready or asleep, and it is not stopping; otherwise 503."""
    scheduler = scheduler_of(request)
    waiting = {name: model.state for name, model in scheduler.models.items() if not model.available}
    asleep = [name for name, model in scheduler.models.items() if model.sleep.asleep]
    is_ready = scheduler.ready
    document = {"ready": is_ready, "waiting_for": waiting} | ({"asleep": asleep} if asleep else {})
    return Json(document, 200 if is_ready else 503)


@router.get("/v2/models/{model}", summary="A model's inputs and outputs", responses=documents.MODEL)
async def metadata(request: Request, model: str) -> dict[str, Any]:
    """Return the metadata of a model, and the certificate of its active version."""
    return _metadata(scheduler_of(request).model(model), None)


@router.get("/v2/models/{model}/versions/{version}", summary="A version", responses=documents.MODEL)
async def version_metadata(request: Request, model: str, version: str) -> dict[str, Any]:
    """Return the metadata of a loaded version."""
    return _metadata(scheduler_of(request).model(model), version)


@router.get("/v2/models/{model}/ready", summary="Whether a model answers", responses=documents.READY)
async def model_ready(request: Request, model: str) -> Response:
    """200 if it answers, or is asleep until the next request; otherwise 503 with the cause."""
    found = scheduler_of(request).model(model)
    document: dict[str, Any] = {"name": model, "ready": found.available, "state": found.state}
    if not found.available:
        document["error"] = without_folders(found.cause)
    return Json(document, 200 if found.available else 503)


@router.get(
    "/v2/models/{model}/versions/{version}/ready",
    summary="Whether a version answers",
    responses=documents.READY,
)
async def version_ready(request: Request, model: str, version: str) -> Response:
    """200 or 503 as for the model; 404 if the model is ready or asleep, but this version is not loaded."""
    found = scheduler_of(request).model(model)
    if found.available:
        found.version(version)
    return await model_ready(request, model)


@router.post(
    "/v2/models/{model}/infer",
    summary="Answer inputs",
    responses=documents.INFER,
    openapi_extra=documents.INFER_BODY,
)
async def infer(request: Request, model: str) -> Response:
    """Answer one or more inputs with the active version.

    Parameters of the request: `latency_slo_ms` (refused with 429 if it cannot be met), `timeout_ms`,
    `priority` (1 is the highest), `place` (such as a camera's name: memory is kept per place). Parameters of
    the response: `latency_ms`, `service_ms`, `queue_ms`, `from_cache`, `exit` (if it is the same for all
    inputs), `slo_met` (with an SLO), `promise` (about the answer, with its basis) and `certificate`, if any.
    """
    return await answer(request, model, None)


@router.post(
    "/v2/models/{model}/versions/{version}/infer",
    summary="Answer inputs with a version",
    responses=documents.INFER,
    openapi_extra=documents.INFER_BODY,
)
async def version_infer(request: Request, model: str, version: str) -> Response:
    """As `infer`, with a loaded version."""
    return await answer(request, model, version)


async def answer(request: Request, name: str, version: str | None) -> Response:
    """As `infer`, called without the framework's routing. Raises `GatiError`."""
    scheduler = scheduler_of(request)
    arrived_s = scheduler.arrival_s(request)
    kind = f"models/{name}"
    if version is None:  # a named version has a queue of its own
        scheduler.check_room(kind, arrived_s)
    with scheduler.under_way(kind) as charge:
        model = scheduler.model(name)
        if model.info is None and not model.available:  # what its inputs are is not known yet
            raise model.unavailable()
        if request.scope["query_string"]:
            raise RequestError(
                "parameters in the URL have no effect here; give them in `parameters` of the JSON"
            )
        asked = await read_inference(request, scheduler, charge, model.info)
        timing = scheduler.timing(
            arrived_s,
            asked.latency_slo_ms,
            asked.timeout_ms,
            asked.priority,
            request.headers.get("traceparent"),
        )
        parameters = scheduler.asked(kind, timing, asked.place)
        called_ms = timing.elapsed_ms()
        demand = Demand.of(timing.latency_slo_ms, inputs_in(asked.tensor), timing.priority)
        with scheduler.entrance(kind).asking(demand) if version is None else nullcontext():
            found = await unless_gone(request, model.infer(asked.tensor, parameters, version))
    latency_ms = timing.elapsed_ms()
    _record(request, name, found, timing, called_ms, latency_ms)
    head: dict[str, Any] = {"model_name": name, "model_version": found.version}
    if asked.id is not None:
        head["id"] = asked.id
    head["parameters"] = _parameters(model, found, latency_ms, timing.latency_slo_ms)
    content, length = render_response(head, found.answers, model.info.class_names, asked.outputs)
    if length is None:
        return Made(content, JSON)
    return Made(content, BINARY, (_LENGTH, b"%d" % length))


def _record(
    request: Request, name: str, found: Any, timing: Timing, called_ms: float, latency_ms: float
) -> None:
    """Record an answer of the model `name`, which was called `called_ms` after the request arrived."""
    scheduler = scheduler_of(request)
    if (trace := trace_of(request.scope)) is not None:
        exits = [each.exit for each in found.answers]
        call = called(name, found.version, exits, (called_ms, latency_ms), found.latency_ms)
        trace.answered(timing.trace_id, {}, [call])
    scheduler.answered(f"models/{name}", latency_ms - called_ms, found.latency_ms)
    scheduler.dashboards[name].answered(found, latency_ms)
    scheduler.metrics.request_seconds.labels(name).observe(latency_ms / 1e3)
    if timing.latency_slo_ms is not None and latency_ms > timing.latency_slo_ms:
        scheduler.metrics.request_slo_missed.labels(name).inc()
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug(
            "request",
            extra={
                "model": name,
                "version": found.version,
                "exits": [each.exit for each in found.answers],
                "latency_ms": round(latency_ms, 3),
                "service_ms": round(found.latency_ms, 3),
                "trace_id": timing.trace_id,
            },
        )


def _parameters(model: Model, found: Any, latency_ms: float, slo_ms: float | None) -> dict[str, Any]:
    exits = {each.exit for each in found.answers}
    parameters: dict[str, Any] = {
        "latency_ms": latency_ms,
        "service_ms": found.latency_ms,
        "queue_ms": found.queue_ms,
    }
    if len(exits) == 1:  # only if it is the same for all inputs; the output `exit` lists each
        parameters["exit"] = found.answers[0].exit
    parameters["from_cache"] = BASE not in exits
    if slo_ms is not None:
        parameters["slo_met"] = latency_ms <= slo_ms
    if found.promise is not None:
        parameters["promise"] = found.promise
    if found.certificate_id is not None:
        certificate = model.certificate(found.version, of=found.certificate_id)
        if certificate is not None:
            parameters["certificate"] = certificate.get("sentence", "")
    return parameters


def _arrays(info: Any) -> list[dict[str, Any]]:
    """Return the metadata of the network's inputs."""
    if not info.inputs:
        return [{"name": "input", "datatype": "FP32", "shape": [-1, *info.input_shape]}]
    return [
        {"name": each.name, "datatype": each.datatype, "shape": [-1, *([-1] if each.shorter else each.shape)]}
        for each in info.inputs
    ]


def _raw(info: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the parameters of the BYTES input that a model also accepts; None without one."""
    if info.text is not None:
        known = {"sha256": info.text.tokenizer_sha256, "max_length": info.text.length}
        return "text", {"tokenizer": known}
    if info.sound is not None:
        return "recording", {"sound": {"sample_rate": info.sound.sample_rate, "seconds": info.sound.seconds}}
    return None


def _inputs(info: Any) -> list[dict[str, Any]]:
    raw, arrays = _raw(info), _arrays(info)
    return arrays if raw is None else [{"name": raw[0], "datatype": BYTES, "shape": [-1]}, *arrays]


def _alternatives(info: Any) -> dict[str, Any]:
    """Return the alternatives if a model accepts text or recordings, or the arrays made from them."""
    raw = _raw(info)
    if raw is None:
        return {}
    name, known = raw
    return {"input_alternatives": [[name], [each["name"] for each in _arrays(info)]], **known}


def _metadata(model: Model, version: str | None) -> dict[str, Any]:
    active = model.active if version is None else model.version(version)
    info = model.info
    certificate = model.certificate(active.version)
    pending = model.pending
    return {
        "name": model.name,
        "versions": [each.version for each in info.versions],
        "platform": f"gati_{active.backend}",
        "inputs": _inputs(info),
        "outputs": [
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, info.classes]},
            {"name": "class_index", "datatype": "INT64", "shape": [-1]},
            {"name": "class_name", "datatype": "BYTES", "shape": [-1]},
            {"name": "exit", "datatype": "BYTES", "shape": [-1]},
        ],
        "parameters": {
            "active_version": model.active.version,
            "exits": active.exits,
            "caches_memory_bytes": active.memory_bytes,
            "image_shape": [size or -1 for size in info.image_shape],
            "largest_batch": info.largest_batch,
            **_alternatives(info),
            **({"longest_input": info.inputs[0].shape[0]} if info.inputs and info.inputs[0].shorter else {}),
            "certificate": certificate,
            "state": active.state,
            "promise": active.promise,
            "proof": progress_of(active.proof),
            "pending": None
            if pending is None
            else {
                "version": pending.version,
                "promise": pending.promise,
                "proof": progress_of(pending.proof),
            },
        },
    }
