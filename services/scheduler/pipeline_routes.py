"""Routes of pipelines: queries and descriptions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from gati.errors import DeadlineError, OverloadError, RequestError
from gati.pipelines import LivePlanner, OptionReport
from services.config import ServeConfig
from services.scheduler import documents
from services.scheduler.bodies import read_body, unless_gone
from services.scheduler.budget import Charge
from services.scheduler.entrance import Demand
from services.scheduler.images import read_image
from services.scheduler.parameters import WISHES, check_names, place, positive, priority
from services.scheduler.pipelines import PipelineAnswer, ServedPipeline
from services.scheduler.protocol import HEADER_LENGTH
from services.scheduler.reading import largest_body, parse_inference
from services.scheduler.replies import Json
from services.scheduler.scheduler import Scheduler, scheduler_of
from services.scheduler.timing import Timing
from services.scheduler.tracing import TracedCall, called, trace_of
from services.wire.gen.ttypes import Tensor
from services.wire.tensors import BYTES, LONGEST_TEXT_BYTES, packed_files, text_tensor

router = APIRouter(tags=["pipelines"])

_log = logging.getLogger("gati.rest")

_AUDIO = "audio/"
_MOST_PARTS = 16
_FILE_BYTES = 4  # most bytes of a file per pixel
_OTHER_BYTES = 64 * 1024  # overhead of a form around the file, or of a file around the pixels
_FORM_STEP_BYTES = 2**18


@router.get("/v1/pipelines", summary="The pipelines")
async def pipelines(request: Request) -> dict[str, Any]:
    """Return every pipeline with its stages and their options."""
    scheduler = scheduler_of(request)
    return {"pipelines": [_described(name, each) for name, each in scheduler.pipelines.items()]}


@router.get("/v1/pipelines/{pipeline}", summary="A pipeline", responses=documents.PIPELINE)
async def pipeline(request: Request, pipeline: str) -> dict[str, Any]:
    """Return the stages of a pipeline, and the measurements of their options."""
    scheduler = scheduler_of(request)
    return _described(pipeline, scheduler.pipeline(pipeline))


@router.post(
    "/v1/pipelines/{pipeline}/query",
    summary="Answer a query",
    responses=documents.QUERY,
    openapi_extra=documents.QUERY_BODY,
)
async def query(request: Request, pipeline: str) -> Response:
    """Answer a query for one input.

    The input is an image (in a form or as the body), a text or a recording (as the body), or a tensor as in
    V2. `latency_slo_ms`, `timeout_ms`, `priority` and `place` are parameters of the URL, fields of the form,
    or `parameters` of the JSON. The answer contains every stage's option, exit, latency and budget.
    """
    return await answer(request, pipeline)


async def answer(request: Request, pipeline: str) -> Response:
    """As `query`, called without the framework's routing. Raises `GatiError`."""
    scheduler = scheduler_of(request)
    arrived_s = scheduler.arrival_s(request)
    kind = f"pipelines/{pipeline}"
    scheduler.check_room(kind, arrived_s)
    with scheduler.under_way(kind) as charge:
        served = scheduler.pipeline(pipeline)
        taken, wishes = await _read(request, scheduler, charge)
        slo_ms = positive(wishes, "latency_slo_ms") or served.default_slo_ms
        timing = scheduler.timing(
            arrived_s,
            slo_ms,
            positive(wishes, "timeout_ms"),
            priority(wishes.get("priority")),
            request.headers.get("traceparent"),
        )
        where = place(wishes.get("place"))

        async def answered() -> PipelineAnswer:
            nonlocal taken
            if isinstance(taken, bytes):  # nothing may keep the file while services work
                taken = await _decoded(taken, served.channels, timing, scheduler, charge)
            with scheduler.entrance(kind).asking(Demand.of(slo_ms, 1, timing.priority)):
                return await served.answer(taken, timing, where, scheduler.outside_ms(kind))

        found = await unless_gone(request, answered())
    latency_ms = timing.elapsed_ms()
    _record(request, pipeline, served, found, timing, latency_ms)
    return Json(
        {
            "pipeline": pipeline,
            "label": found.label,
            "stages": found.stages,
            "skipped": found.skipped,
            "policy": served.planner.policy,
            "latency_ms": latency_ms,
            "latency_slo_ms": slo_ms,
            "slo_met": None if slo_ms is None else latency_ms <= slo_ms,
            "trace_id": timing.trace_id,
        }
    )


def _record(
    request: Request,
    pipeline: str,
    served: ServedPipeline,
    found: PipelineAnswer,
    timing: Timing,
    latency_ms: float,
) -> None:
    """Record an answer of a pipeline."""
    scheduler, stages = scheduler_of(request), found.stages
    way_ms = latency_ms - stages[0]["started_ms"]
    scheduler.answered(f"pipelines/{pipeline}", way_ms, served.foreseen_ms(stages))
    if (trace := trace_of(request.scope)) is not None:
        trace.answered(timing.trace_id, {"gati.pipeline": pipeline}, map(_call_of, stages))
    scheduler.metrics.pipeline_seconds.labels(pipeline).observe(latency_ms / 1e3)
    if timing.latency_slo_ms is not None and latency_ms > timing.latency_slo_ms:
        scheduler.metrics.slo_missed.labels(pipeline).inc()
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug(
            "query",
            extra={
                "pipeline": pipeline,
                "label": found.label,
                "options": [stage["option"] for stage in stages],
                "latency_ms": round(latency_ms, 3),
                "trace_id": timing.trace_id,
            },
        )


def _call_of(stage: Mapping[str, Any]) -> TracedCall:
    began_ms = stage["started_ms"]
    between_ms = (began_ms, began_ms + stage["latency_ms"])
    return called(stage["model"], stage["version"], [stage["exit"]], between_ms, stage["service_ms"])


async def _decoded(file: bytes, channels: int, timing: Timing, scheduler: Scheduler, charge: Charge) -> Any:
    """Return an image file as the wire's `Tensor`.

    Raises `OverloadError` if its SLO passes before a thread is free to decode it, and `DeadlineError` if its
    timeout does.
    """
    slo_ms, most = timing.latency_slo_ms, scheduler.config.largest_image_pixels
    limit_ms = timing.timeout_ms if slo_ms is None else min(slo_ms, timing.timeout_ms)
    try:
        async with asyncio.timeout((limit_ms - timing.elapsed_ms()) / 1e3):
            return await read_image(file, channels, most, charge, scheduler.pool)
    except TimeoutError:
        if limit_ms == slo_ms:
            raise OverloadError("the SLO passed before the image was decoded", retry_after_s=0.5) from None
        raise DeadlineError("the deadline passed before the image was decoded") from None


async def _read(request: Request, scheduler: Scheduler, charge: Charge) -> tuple[Any, dict[str, Any]]:
    """Return the input of a query, an image file or else the wire's `Tensor`, and its parameters."""
    wishes: dict[str, Any] = dict(request.query_params)
    check_names(wishes, WISHES)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_tensor = kind == "application/json" or HEADER_LENGTH in request.headers
    config = scheduler.config
    largest_bytes = largest_body(request, config) if is_tensor else _largest_file(kind, config)
    with scheduler.receiving(charge.owner):
        body = await read_body(request, largest_bytes, charge, scheduler.pool)
    if is_tensor:
        asked = await parse_inference(request, body, scheduler, charge)
        if asked.tensor.shape[:1] != [1]:
            raise RequestError(f"a query is for one input, got shape {asked.tensor.shape}")
        own = {name: value for name in WISHES if (value := getattr(asked, name)) is not None}
        return asked.tensor, wishes | own
    if kind == "multipart/form-data":
        charge.add(_FORM_STEP_BYTES)
        whole = [body]
        del body  # `_form` takes it out of `whole`, so that it is freed before the file is read
        body, fields = await _form(request, whole)
        check_names(fields, WISHES)
        wishes |= fields
    if not body:
        raise RequestError(
            "the body is empty; send an image, a form with a file `image`, text, a recording or a tensor"
        )
    if kind == "text/plain":
        return _text(body), wishes
    if kind.startswith(_AUDIO):
        charge.add(len(body))  # `packed_files` makes a copy
        return Tensor(BYTES, [1], packed_files([body])), wishes
    return body, wishes


def _largest_file(kind: str, config: ServeConfig) -> int:
    """The largest body in bytes of a query that is no tensor, by its content type."""
    if kind.startswith(_AUDIO):
        return config.largest_body_bytes
    if kind == "text/plain":
        return min(config.largest_body_bytes, LONGEST_TEXT_BYTES)
    return min(config.largest_body_bytes, _FILE_BYTES * config.largest_image_pixels + _OTHER_BYTES)


def _text(body: bytes) -> Any:
    """Return a text as the wire's `Tensor`. Raises `RequestError` if it is not UTF-8."""
    try:
        return text_tensor([body.decode("utf-8")])
    except UnicodeDecodeError as error:
        raise RequestError("the text is not UTF-8; send UTF-8") from error


async def _form(request: Request, whole: list[bytes]) -> tuple[bytes, dict[str, Any]]:
    """Return the file `image` of a form, and its other fields. Removes the body from `whole`."""

    async def stream() -> AsyncGenerator[bytes]:
        body = memoryview(whole.pop())
        for start in range(0, len(body), _FORM_STEP_BYTES):
            await asyncio.sleep(0)  # let other requests run
            yield bytes(body[start : start + _FORM_STEP_BYTES])

    try:
        parser = MultiPartParser(
            Headers(raw=request.headers.raw),
            stream(),
            max_files=1,
            max_fields=_MOST_PARTS,
            max_part_size=4096,
        )
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError, UnicodeDecodeError, AssertionError) as error:
        raise RequestError(f"the form cannot be parsed ({str(error)[:120]})") from error
    try:
        image = form.get("image")
        if not isinstance(image, UploadFile):
            raise RequestError("the form has no file `image`; add one")
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        return await image.read(), fields
    finally:
        await form.close()


def _described(name: str, served: ServedPipeline) -> dict[str, Any]:
    found = served.planner.pipeline
    live = _live(served)
    return {
        "name": name,
        "ready": served.ready,
        "policy": served.planner.policy,
        "live": served.replanning is not None,
        "replans": served.planner.replans if isinstance(served.planner, LivePlanner) else 0,
        "input": found.input,
        "outputs": found.outputs,
        "stages": [
            {
                "name": stage.name,
                "labels": stage.labels,
                "after": [
                    {"stage": edge.source, "when": None if edge.when is None else sorted(edge.when)}
                    for edge in found.edges_to[stage.name]
                ],
                "options": [
                    {
                        "name": option.name,
                        "accuracy": option.accuracy,
                        "mean_latency_ms": option.measured_latency.mean_ms,
                        "live": live.get((stage.name, option.name)),
                    }
                    for option in stage.options.values()
                ],
            }
            for stage in found.stages.values()
        ],
    }


def _live(served: ServedPipeline) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the live figures of each option, learned from traffic; empty unless the planner is live."""
    if not isinstance(served.planner, LivePlanner):
        return {}
    return {(report.stage, report.option): _shown(report) for report in served.planner.report()}


def _shown(report: OptionReport) -> dict[str, Any]:
    agreement = report.agreement
    return {
        "requests": report.chosen,
        "explored": report.explored,
        "evidence": report.evidence,
        "prior_share": report.prior_share,
        "engine_ms": report.engine_ms,
        "queue_ms": report.queue_ms,
        "way_ms": report.way_ms,
        "hit_rate": report.hit_rate,
        "agreement": None
        if agreement is None
        else {
            "expected": agreement.expected,
            "promised": agreement.promised,
            "based_on": agreement.based_on,
        },
    }
