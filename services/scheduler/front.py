"""The front end: admission, a fast path for inference and queries, and refusal under overload.

Refusing a request for overload must cost almost nothing, or the refusals themselves become the overload. So
requests that arrive while the event loop is behind are refused before their bodies are read.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gati.errors import ForbiddenError, GatiError, MediaTypeError, NotAllowedError, OverloadError
from services.scheduler import pipeline_routes, replies, v2
from services.scheduler.access import Access
from services.scheduler.admission import admit
from services.scheduler.entrance import CrowdedError
from services.scheduler.keys import Key
from services.scheduler.quotas import counted
from services.scheduler.scheduler import Scheduler

# Returns the handler of a request on the fast path, None for other requests.
Busy = Callable[[Scope], Callable[[Request], Awaitable[Response]] | None]

_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_QUERY = re.compile(r"/v1/pipelines/([^/]+)/query")


class Front:
    """An ASGI application in front of `app`, which has all endpoints and their docs but does not check keys.

    `busy` returns the handler of a request that is answered without routing by `app`.
    """

    def __init__(self, app: FastAPI, busy: Busy | None = None) -> None:
        self._app = app
        self._busy = busy or _busy
        self._scheduler: Scheduler = app.state.scheduler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; anything but HTTP goes to `app`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app
        request = _FastRequest(scope, receive)
        scheduler = self._scheduler
        leaving = scheduler.leaving or scheduler.draining
        access = Access(request, send, scheduler.config.log_sampling, scheduler.telemetry, leaving=leaving)
        try:
            await self._serve(request, access, send)
        finally:
            access.ended()

    async def _serve(self, request: Request, access: Access, send: Send) -> None:
        reply: Response | None = None
        with ExitStack() as until_answered:
            try:
                key = self._admit(request)
                if key is not None:
                    access.key = key.name
                    self._within_quota(key, request.scope["path"], until_answered)
                    if key.quota.counts_bytes:
                        request = _FastRequest(request.scope, counted(request.receive, key.quota))
                work = self._busy(request.scope)
                if work is not None:
                    self._scheduler.check_lag(request.scope["path"])
                    reply = await work(request)
            except CrowdedError as error:
                access.quiet = True
                self._scheduler.crowded(error, request.scope["path"])
                reply = replies.refused(request, error)
            except GatiError as error:
                reply = replies.refused(request, error)
            except Exception as error:
                reply = replies.mistake(request, error)
            if reply is None:
                if request.method == "HEAD":
                    as_get = {**request.scope, "method": "GET"}
                    await self._app(as_get, request.receive, _head_only(access.send))
                else:
                    await self._app(request.scope, request.receive, access.send)
            else:
                access.replies(reply)
                await reply(request.scope, request.receive, send)

    def _within_quota(self, key: Key, path: str, until_answered: ExitStack) -> None:
        try:
            until_answered.enter_context(key.quota.request())
        except OverloadError:
            self._scheduler.refused("quota", path)
            raise

    def _admit(self, request: Request) -> Key | None:
        scheduler = self._scheduler
        try:
            return admit(request, scheduler.config, scheduler.keys)
        except (NotAllowedError, ForbiddenError, MediaTypeError) as error:
            scheduler.turned_away(error, request.scope.get("client"))
            raise


def _head_only(send: Send) -> Send:
    """Send only the head of a reply, and end it there: it may be a stream without an end."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b""})

    return sending


class _Headers(Headers):
    """Headers in a dict, for fast lookup: about a dozen are looked up per request, and most are absent."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        self._first = dict(reversed(raw))  # the first value of each name

    def get(self, key: str, default: Any = None) -> Any:
        """The first value of a header, else `default`."""
        found = self._first.get(_raw(key))
        return default if found is None else found.decode("latin-1")

    def __getitem__(self, key: str) -> str:
        return self._first[_raw(key)].decode("latin-1")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and _raw(key) in self._first


@lru_cache(64)
def _raw(key: str) -> bytes:
    return key.lower().encode("latin-1")


class _FastRequest(Request):
    """A request with headers that are looked up fast."""

    @property
    def headers(self) -> Headers:
        """The headers as `_Headers`."""
        if not hasattr(self, "_headers"):
            self._headers: Headers = _Headers(self.scope["headers"])
        return self._headers


def _busy(scope: Scope) -> Callable[[Request], Awaitable[Response]] | None:
    """The handler of an inference request or a pipeline query, else None."""
    if scope["method"] != "POST":
        return None
    path = scope["path"]
    if match := _INFER.fullmatch(path):
        model, version = match.groups()
        return lambda request: v2.answer(request, model, version)
    if match := _QUERY.fullmatch(path):
        pipeline = match[1]
        return lambda request: pipeline_routes.answer(request, pipeline)
    return None
