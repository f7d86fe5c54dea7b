"""The live page over HTTP: an HTML file, server-sent events, and the latest picture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Self

import orjson
import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send

from gati.errors import ConfigError
from gati.hosts import is_loopback
from services.live.state import LiveState

_HTML = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_HOST = "127.0.0.1"
_MOST_VIEWERS = 64
_START_TIMEOUT_S = 10.0
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def live_router(
    state: LiveState,
    *,
    interval_s: float = 0.1,
    heartbeat_s: float = 5.0,
    stopping: threading.Event | None = None,
) -> APIRouter:
    """Return the routes `/` (the page), `/events` and `/frame.jpg`; they can be mounted under any prefix.

    Viewers get updates at most every `interval_s`, and a heartbeat every `heartbeat_s`. They are
    disconnected when `stopping` is set.
    """
    router = APIRouter(include_in_schema=False)
    page_headers = {**_HEADERS, "Content-Security-Policy": _policy(_HTML)}
    viewers: set[object] = set()

    @router.get("/")
    async def page() -> Response:
        return Response(_HTML, media_type="text/html", headers=page_headers)

    @router.get("/events")
    async def events(request: Request) -> Response:
        if len(viewers) >= _MOST_VIEWERS:
            text = f"this page already has {_MOST_VIEWERS} viewers, the maximum; close one of the pages"
            return JSONResponse({"error": text}, 503, {"Retry-After": "10"})
        told = _told(state, request.headers.get("last-event-id", ""))

        async def stream() -> AsyncIterator[bytes]:
            viewer = object()
            viewers.add(viewer)
            try:
                async for each in _tell(state, told, interval_s, heartbeat_s):
                    yield each
                    if (stopping and stopping.is_set()) or await request.is_disconnected():
                        return
            finally:
                viewers.discard(viewer)

        headers = {**_HEADERS, "X-Accel-Buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)

    @router.get("/frame.jpg")
    async def frame() -> Response:
        content = await run_in_threadpool(state.jpeg)
        if content is None:
            return JSONResponse({"error": "no picture has come yet"}, 404, _HEADERS)
        return Response(content, media_type="image/jpeg", headers=_HEADERS)

    return router


def serve_page(state: LiveState, port: int = 0) -> RunningPage:
    """Serve the page of a state on this machine at `RunningPage.url`; port 0 picks a free port.

    **Raises:** `ConfigError` if the port is not available.
    """
    try:
        listening = socket.create_server((_HOST, port))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot show the live page on {_HOST}:{port} ({why}); choose another port"
        ) from error
    running = RunningPage(state, listening)
    running.start()
    return running


class RunningPage:
    """A live page served by a separate thread; see `serve_page`."""

    def __init__(self, state: LiveState, listening: socket.socket) -> None:
        self.port: int = listening.getsockname()[1]
        self.url = f"http://{_HOST}:{self.port}/"
        self._listening = listening
        self._stopping = threading.Event()
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.include_router(live_router(state, stopping=self._stopping))
        self._server = _Server(
            uvicorn.Config(
                _LocalNames(app),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._run, name="live-page", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start serving."""
        self._thread.start()
        until_s = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < until_s:
            time.sleep(0.005)

    def close(self) -> None:
        """Disconnect viewers and stop serving; idempotent."""
        self._stopping.set()
        self._server.should_exit = True
        self._thread.join()
        self._listening.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._listening]))


class _Server(uvicorn.Server):
    """A server that leaves signals to the program that runs the stream."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _LocalNames:
    """Refuses Host names that are not loopback, against DNS rebinding: pictures of cameras are private."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if not is_loopback(re.sub(r":\d+\Z", "", host).strip("[]")):
                refusal = JSONResponse(
                    {"error": "this page is available only under the name localhost or a loopback address"},
                    403,
                )
                return await refusal(scope, receive, send)
        await self._app(scope, receive, send)


# --------------------------------------------------------------------------------------------------------


async def _tell(
    state: LiveState, told: int | None, interval_s: float, heartbeat_s: float
) -> AsyncIterator[bytes]:
    """Send the whole state, then updates. A slow viewer gets everything it missed in one update."""
    yield b"retry: 1000\n\n"
    last_s = time.monotonic()
    while True:
        if told is None or state.sequence != told:
            document = state.since(told or 0)
            kind = "snapshot" if told is None else "delta"
            told = document["sequence"]
            last_s = time.monotonic()
            yield _event(kind, f"{state.key}-{told}", document)
        elif time.monotonic() - last_s >= heartbeat_s:
            last_s = time.monotonic()
            yield b"event: heartbeat\ndata: {}\n\n"
        else:
            yield b""  # so that the caller can check whether the client is still connected
        await asyncio.sleep(interval_s)


def _event(kind: str, identity: str, document: dict[str, Any]) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (identity.encode(), kind.encode(), orjson.dumps(document))


def _told(state: LiveState, last_event_id: str) -> int | None:
    """The last event a returning viewer has seen; None for new viewers, and for viewers of an earlier run."""
    key, _, sequence = last_event_id.rpartition("-")
    if key != state.key or not re.fullmatch(r"[0-9]{1,15}", sequence) or int(sequence) > state.sequence:
        return None
    return int(sequence)


def _policy(html: str) -> str:
    """A content security policy that allows only the page's own script and style."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
