"""The REST front end of the eviction service: continuations, and the state of the fitter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Scope

from gati.version import __version__
from services.eviction.continuations import Continuations
from services.eviction.conversations import MOST_CONVERSATIONS, read_asked
from services.eviction.status import metrics_page, read_status
from services.scheduler.app import answer_errors
from services.scheduler.bodies import read_body
from services.scheduler.budget import check_json
from services.scheduler.documents import error_replies
from services.scheduler.replies import Json
from services.scheduler.scheduler import Scheduler, scheduler_of

_INLINE_BYTES = 8_192  # for smaller bodies, waking a thread takes longer than the answer

_TEXTS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "object", "properties": {"text": {"type": "string"}}}},
]
_USER = "^([Uu]|[Uu][Ss][Ee][Rr]|[Hh][Uu][Mm][Aa][Nn])$"
_OF_USERS = {
    "type": "object",
    "description": "A prompt: a text, or its parts; parts that are not text are skipped.",
    "properties": {"role": {"type": "string", "pattern": _USER}, "content": {"oneOf": _TEXTS}},
    "required": ["role", "content"],
}
_OF_OTHERS = {
    "type": "object",
    "description": "Any other message, which may have no text.",
    "properties": {
        "role": {"type": "string", "not": {"pattern": _USER}},
        "content": {"oneOf": [*_TEXTS, {"type": "null"}]},
    },
    "required": ["role"],
    "anyOf": [{"required": [name]} for name in ("content", "tool_calls", "function_call")],
}
_MESSAGES = {
    "type": "array",
    "description": "Messages of the chat, in order; only messages of users are used.",
    "items": {"oneOf": [_OF_USERS, _OF_OTHERS]},
}
_ONE = {"type": "object", "properties": {"messages": _MESSAGES}, "required": ["messages"]}
_MANY = {
    "type": "object",
    "properties": {"conversations": {"type": "array", "maxItems": MOST_CONVERSATIONS, "items": _ONE}},
    "required": ["conversations"],
}
_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"oneOf": [_ONE, _MANY]}}}}
}
_REASONS = {
    400: "Malformed JSON, or the wrong shape",
    401: "The key is missing or wrong",
    403: "The origin or the key is not permitted",
    413: "Too many messages, or too large",
    422: "A conversation without a prompt, or an invalid message",
    429: "Overloaded, or a quota is used up; try again after Retry-After",
    503: "No model is loaded, or the server is shutting down",
}
_REPLIES = error_replies(_REASONS)
_PROBABILITY = {"type": "number", "minimum": 0.0, "maximum": 1.0}
_REPLIES[200] = {
    "description": "p: probability of another prompt; a list for conversations. version: the model's.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "p": {"oneOf": [_PROBABILITY, {"type": "array", "items": _PROBABILITY}]},
                    "version": {"type": "string"},
                },
                "required": ["p", "version"],
            }
        }
    },
}

router = APIRouter()


@dataclass(frozen=True)
class EvictionState:
    """Data of the routes: the continuation model, and the folder of access logs and versions."""

    continuations: Continuations
    folder: Path


@router.post("/v1/continue", summary="Which conversations go on", responses=_REPLIES, openapi_extra=_BODY)
async def continue_(request: Request) -> Response:
    """Return the probability of another prompt after the latest, for one conversation or up to 1,024."""
    return await answer(request)


@router.get("/v1/eviction", summary="What was read, fitted and published")
async def eviction(request: Request) -> dict[str, Any]:
    """Return the state of the fitter, a few seconds old; `{}` before it has started."""
    return read_status(_state(request).folder)


@router.get("/v2/health/live", summary="Whether the server runs")
async def live() -> dict[str, bool]:
    """Return true: the server runs."""
    return {"live": True}


@router.get("/v2/health/ready", summary="Whether it answers")
async def ready(request: Request) -> Response:
    """Status 503 until the continuation model is loaded, and while the server shuts down."""
    scheduler = scheduler_of(request)
    found = _state(request).continuations.ready and scheduler.ready
    return Json({"ready": found}, 200 if found else 503)


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    """Return metrics of engines, of the fitter, and of this server."""
    page = scheduler_of(request).metrics.render({}, {}, {}) + metrics_page(
        read_status(_state(request).folder)
    )
    return Response(page, media_type=CONTENT_TYPE_LATEST)


def create_eviction_app(scheduler: Scheduler, state: EvictionState) -> FastAPI:
    """Create the application. `scheduler` has no models, only the limits and keys that all routes share."""
    app = FastAPIOffline(
        redoc_url=None,
        title="Gati, learned eviction",
        version=__version__,
        description="How likely conversations are to continue, and what accesses to prefix caches teach.",
    )
    app.state.scheduler = scheduler
    app.state.eviction = state
    app.include_router(router)
    answer_errors(app)
    return app


async def answer(request: Request) -> Response:
    """Return the reply to `POST /v1/continue`. Raises errors of the request, and `UnavailableError`."""
    scheduler, continuations = scheduler_of(request), _state(request).continuations
    with scheduler.under_way() as charge:
        with scheduler.receiving():
            body = await read_body(request, scheduler.config.largest_body_bytes, charge, scheduler.pool)
        charge.add(check_json(body, scheduler.config.largest_json_bytes))
        if len(body) <= _INLINE_BYTES and continuations.quick:
            return Json(_answered(body, continuations))
        return Json(await scheduler.pool.run(_answered, body, continuations))


def find_busy(scope: Scope) -> Callable[[Request], Awaitable[Response]] | None:
    """Return the handler of `POST /v1/continue`, or None for other requests."""
    return answer if scope["method"] == "POST" and scope["path"] == "/v1/continue" else None


def _answered(body: bytes, continuations: Continuations) -> dict[str, Any]:
    asked = read_asked(body)
    found, version = continuations.predict(asked.prompts)
    return {"p": found if asked.listed else found[0], "version": version}


def _state(request: Request) -> EvictionState:
    state: EvictionState = request.app.state.eviction
    return state
