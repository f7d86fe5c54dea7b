"""`/v1/completions` as an ASGI application: admission, routes, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gati.errors import (
    CancelledError,
    GatiError,
    NotFoundError,
    OverloadError,
    RequestError,
    UnavailableError,
)
from gati.evict.engine.engine import PrefixEngine
from gati.evict.engine.generation import TooLongError
from gati.evict.engine.tokens import Vocabulary
from services.completions.asking import AskedCompletion, read_completion
from services.completions.metrics import CompletionMetrics
from services.completions.running import CompletionPiece, RunningCompletion
from services.config import ServeConfig
from services.pool import BoundedPool
from services.scheduler.access import Access
from services.scheduler.admission import admit
from services.scheduler.bodies import read_body, unless_gone
from services.scheduler.budget import ByteBudget, Charge, check_json
from services.scheduler.keys import KeyRing
from services.scheduler.quotas import counted

_log = logging.getLogger("gati.completions")

_LARGEST_BODY_BYTES = 4 * 2**20
_COPIES_BYTES = 24  # a token in a list and in a tuple, and its int object
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
_KINDS |= {404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}
_CODES = {OverloadError: "rate_limit_exceeded", TooLongError: "context_length_exceeded"}  # that clients know


class CompletionsApp:
    """The ASGI application of one engine. Clients know its network as `name`."""

    def __init__(self, engine: PrefixEngine, tokens: Vocabulary, name: str, config: ServeConfig) -> None:
        self._engine = engine
        self._tokens = tokens
        self.name = name
        self._config = config
        self._created = int(time.time())
        self._budget = ByteBudget(config.largest_held_bytes)
        self._pool = BoundedPool("gati-reader")
        self.keys = KeyRing(config)
        self.metrics = CompletionMetrics(engine)
        self.ready = True
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope, receive)
        access = Access(request, send, self._config.log_sampling)
        self._under_way += 1
        self._idle.clear()
        try:
            with ExitStack() as until_answered:
                await self._serve(request, access, until_answered)
        finally:
            access.ended()
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Wait until all requests in progress are answered, or until the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    async def _serve(self, request: Request, access: Access, until_answered: ExitStack) -> None:
        respond: ASGIApp
        try:
            key = admit(request, self._config, self.keys)
            if key is not None:
                access.key = key.name
                until_answered.enter_context(key.quota.request())
                if key.quota.counts_bytes:
                    request = Request(request.scope, counted(request.receive, key.quota))
            respond = await self._answer(request, until_answered)
        except CancelledError:
            return
        except GatiError as error:
            self.metrics.refused.labels(type(error).__name__.removesuffix("Error").lower()).inc()
            respond = _refused(error)
        except Exception as error:
            _log.error("unexpected error in a request", exc_info=error, extra={"path": request.url.path})
            respond = _error(500, "internal error; the server's log has the cause")
        if not self.ready and isinstance(respond, Response):
            respond.headers["Connection"] = "close"
        await respond(request.scope, request.receive, access.send)

    async def _answer(self, request: Request, until_answered: ExitStack) -> ASGIApp:
        path, method = request.url.path, request.method
        if path == "/v1/completions" and method == "POST":
            if not self.ready:
                raise UnavailableError("the server is being stopped", retry_after_s=1.0)
            return await self._complete(request, until_answered)
        if method in ("GET", "HEAD"):
            if path == "/metrics":
                page = await self._pool.run(self.metrics.render)  # may wait for evictions
                return Response(page, media_type=CONTENT_TYPE_LATEST)
            if path == "/v2/health/live" or (path == "/v2/health/ready" and self.ready):
                return _json({"live": True} if path.endswith("live") else {"ready": True})
            if path == "/v2/health/ready":
                return _json({"ready": False}, 503)
            if path == "/v1/models":
                return _json({"object": "list", "data": [self._model()]})
            if path == f"/v1/models/{self.name}":
                return _json(self._model())
        raise NotFoundError(f"{method} {path[:80]} is not served; use POST /v1/completions")

    async def _complete(self, request: Request, until_answered: ExitStack) -> ASGIApp:
        with self._budget.open() as charge:
            asked = await self._read(request, charge)
        if asked.model != self.name:
            raise NotFoundError(f"no model {asked.model[:80]!r} is served; there is {self.name!r}")
        count, most = len(asked.requests), self._engine.limits.most_waiting
        if count > most:  # trying again, as after status 429, would not help
            raise RequestError(f"prompt: the list has {count} prompts, but only {most} may wait; send fewer")
        running = RunningCompletion(self._engine, self._tokens, asked, self.metrics.first_token)
        until_answered.enter_context(running)
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        if asked.streams:
            return _Streamed(request, running, head, tells_usage=asked.tells_usage)
        return _json(await unless_gone(request, _whole(running, head)))

    async def _read(self, request: Request, charge: Charge) -> AskedCompletion:
        body = await read_body(request, _LARGEST_BODY_BYTES, charge, self._pool)
        charge.add(check_json(body, self._config.largest_json_bytes) + _COPIES_BYTES * len(body))
        return await self._pool.run(read_completion, body, self._tokens)

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "gati"}


class _Streamed:
    """The answer as server-sent events; the generation ends if the client disconnects."""

    def __init__(
        self, request: Request, running: RunningCompletion, head: Mapping[str, Any], *, tells_usage: bool
    ) -> None:
        self._request = request
        self._running = running
        self._head = head
        self._tells_usage = tells_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self._request, self._send(send))
        except CancelledError:
            return

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        head = {**self._head, "usage": None} if self._tells_usage else self._head  # as OpenAI has it
        try:
            async for piece in self._running.pieces():
                await _event(send, {**head, "choices": [_choice(piece)]})
            if self._tells_usage:
                await _event(send, {**self._head, "choices": [], "usage": self._running.usage()})
            await _event(send, "[DONE]")
        except GatiError as error:  # the status has been sent already
            await _event(send, _document(error.http_status, str(error), _code(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _event(send: Send, content: Any) -> None:
    text = content.encode() if isinstance(content, str) else orjson.dumps(content)
    await send({"type": "http.response.body", "body": b"data: " + text + b"\n\n", "more_body": True})


async def _whole(running: RunningCompletion, head: Mapping[str, Any]) -> dict[str, Any]:
    """The answer in one piece."""
    texts: dict[int, list[str]] = {index: [] for index in range(len(running.generations))}
    reasons: dict[int, str | None] = {}
    async for piece in running.pieces():
        texts[piece.choice].append(piece.text)
        reasons[piece.choice] = piece.finish_reason
    pieces = [CompletionPiece(index, "".join(texts[index]), reasons[index]) for index in texts]
    return {**head, "choices": [_choice(piece) for piece in pieces], "usage": running.usage()}


def _choice(piece: CompletionPiece) -> dict[str, Any]:
    return {
        "index": piece.choice,
        "text": piece.text,
        "logprobs": None,
        "finish_reason": piece.finish_reason,
    }


def _refused(error: GatiError) -> Response:
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    return _error(error.http_status, str(error), _code(error), headers)


def _code(error: GatiError) -> str | None:
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)


def _error(
    status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    return _json(_document(status, message, code), status, headers)


def _document(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    kind = _KINDS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, dict(headers or {}), "application/json")
