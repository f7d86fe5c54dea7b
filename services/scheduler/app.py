"""The REST front end as an ASGI application: routes, errors, keys."""

from __future__ import annotations

import logging
import math
import re
import secrets
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import ORJSONResponse, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException

import gati
from gati.errors import CancelledError, GatiError, NotAllowedError
from services.scheduler import operations, pipeline_routes, v2
from services.scheduler.scheduler import Scheduler

__all__ = ["create_app"]

_log = logging.getLogger("gati.rest")

_OPEN = ("/v2/health/", "/metrics")  # for those who watch, without a key
_MANAGEMENT = "/v2/repository/"
_FOLDERS = re.compile(r"(?:/[\w.@+ -]+)+/")  # of paths in messages: not for clients


def create_app(scheduler: Scheduler) -> FastAPI:
    """The application over a scheduler; starting and stopping that is the caller's business."""
    app = FastAPIOffline(
        redoc_url=None,
        title="Gati",
        version=gati.__version__,
        description="Neural networks with learned caches: easy inputs leave early. "
        "Single models speak the Open Inference Protocol, pipelines take an image and a latency SLO.",
        openapi_tags=[
            {"name": "models", "description": "The Open Inference Protocol (V2), with binary tensors."},
            {"name": "pipelines", "description": "Several networks under one latency SLO."},
            {"name": "operations", "description": "Versions, statistics, health, metrics."},
        ],
    )
    app.state.scheduler = scheduler
    for router in (v2.router, pipeline_routes.router, operations.router):
        app.include_router(router)
    app.add_exception_handler(GatiError, _refused)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _mistake)
    if scheduler.config.api_key is not None or scheduler.config.management_key is not None:
        app.middleware("http")(_ask_for_key)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, GatiError):
        raise AssertionError("registered for GatiError")
    if isinstance(error, CancelledError):
        _log.debug("client gone", extra={"path": request.url.path})
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        headers["Retry-After-Ms"] = str(max(1, math.ceil(1e3 * retry_after_s)))
    if request.app.state.scheduler.draining:
        headers["Connection"] = "close"
    return _error(error.http_status, _FOLDERS.sub("", str(error)), headers)


async def _http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise AssertionError("registered for HTTPException")
    messages = {
        404: "no such endpoint; see /docs",
        405: f"{request.method} is not offered here; see /docs",
    }
    detail = messages.get(error.status_code, str(error.detail))
    return _error(error.status_code, detail, dict(error.headers or {}))


async def _invalid(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise AssertionError("registered for RequestValidationError")
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return _error(422, f"{where}: {first['msg']}", {})


async def _mistake(request: Request, error: Exception) -> Response:
    _log.error("mistake in a request", exc_info=error, extra={"path": request.url.path})
    return _error(500, "internal error; the log has its cause", {})


def _error(status: int, message: str, headers: dict[str, str]) -> Response:
    return ORJSONResponse({"error": message}, status, headers)


async def _ask_for_key(request: Request, call_next: Any) -> Response:
    """Compare the keys in constant time; management may have one of its own."""
    config = request.app.state.scheduler.config
    path = request.url.path
    wanted = config.api_key
    if path.startswith(_MANAGEMENT):
        wanted = config.management_key or config.api_key
    if wanted is not None and not path.startswith(_OPEN):
        given = request.headers.get("x-api-key", "")
        if not secrets.compare_digest(given.encode(), wanted.encode()):
            return await _refused(request, NotAllowedError("a key is needed; send it as X-API-Key"))
    response: Response = await call_next(request)
    return response
