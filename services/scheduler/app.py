"""The REST front end as an ASGI application: routes and errors. Keys are checked in `front`."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException

from gati.errors import GatiError
from gati.version import __version__
from services.invalid import first_invalid
from services.scheduler import operations, pipeline_routes, replies, v2
from services.scheduler.dashboard import dashboards_router
from services.scheduler.scheduler import Scheduler


def create_app(scheduler: Scheduler) -> FastAPI:
    """The application for a scheduler, which the caller starts and stops."""
    app = FastAPIOffline(
        docs_url=None,
        redoc_url=None,
        servers=[{"url": "."}],  # relative to the page, as are its links: a proxy may add a prefix
        title="Gati",
        version=__version__,
        description="Neural networks with learned caches: easy inputs exit early. "
        "Models are served by the Open Inference Protocol; a pipeline takes an input and a latency SLO.",
        openapi_tags=[
            {"name": "models", "description": "The Open Inference Protocol (V2), with binary tensors."},
            {"name": "pipelines", "description": "Several networks with one latency SLO."},
            {"name": "operations", "description": "Versions, statistics, health, metrics."},
        ],
    )
    app.state.scheduler = scheduler
    app.add_api_route("/docs", _documentation, include_in_schema=False)
    for router in (operations.router, v2.router, pipeline_routes.router):
        app.include_router(router)
    app.include_router(dashboards_router(scheduler.dashboards, scheduler.stopping))
    answer_errors(app)
    return app


async def _documentation() -> Response:
    static = "static-offline-docs"
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Gati",
        swagger_js_url=f"{static}/swagger-ui-bundle.js",
        swagger_css_url=f"{static}/swagger-ui.css",
        swagger_favicon_url=f"{static}/favicon.png",
    )


def answer_errors(app: FastAPI) -> None:
    """Make the app answer every error with its status and one line of JSON."""
    app.add_exception_handler(GatiError, _refused)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _mistake)


async def _refused(request: Request, found: Exception) -> Response:
    if not isinstance(found, GatiError):
        raise AssertionError("registered for GatiError")
    return replies.refused(request, found)


async def _http(request: Request, found: Exception) -> Response:
    if not isinstance(found, HTTPException):
        raise AssertionError("registered for HTTPException")
    messages = {
        404: "no such endpoint; see /docs",
        405: f"the method {request.method} is not allowed here; see /docs",
    }
    detail = messages.get(found.status_code, str(found.detail))
    headers = [(name.lower().encode(), value.encode()) for name, value in (found.headers or {}).items()]
    return replies.error(found.status_code, detail, *headers)


async def _invalid(request: Request, found: Exception) -> Response:
    if not isinstance(found, RequestValidationError):
        raise AssertionError("registered for RequestValidationError")
    invalid = first_invalid(found.errors())
    return replies.error(422, f"{invalid.where}: {invalid.message}")


async def _mistake(request: Request, found: Exception) -> Response:
    return replies.mistake(request, found)
