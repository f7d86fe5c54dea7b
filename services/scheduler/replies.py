"""Replies that every endpoint gives in the same way: refusals, mistakes, and whether the key is right."""

from __future__ import annotations

import base64
import logging
import math
import re
import secrets
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gati.errors import GatiError, NotAllowedError
from services.scheduler.scheduler import scheduler_of

__all__ = ["Json", "check_key", "error", "mistake", "refused"]

_log = logging.getLogger("gati.rest")

_OPEN = ("/v2/health/", "/metrics")  # for those who watch, without a key
_MANAGEMENT = "/v2/repository/"
_FOLDERS = re.compile(r"(?:/[\w.@+ -]+)+/")  # of paths in messages: not for clients


class Json(Response):
    """A JSON document, numpy arrays and all."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The document as bytes."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def refused(request: Request, found: GatiError) -> Response:
    """What a refusal looks like: its status, one line, and when to try again."""
    _log.debug("refused", extra={"path": request.url.path, "reason": str(found)})
    headers = {}
    retry_after_s = getattr(found, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        headers["Retry-After-Ms"] = str(max(1, math.ceil(1e3 * retry_after_s)))
    if scheduler_of(request).draining:
        headers["Connection"] = "close"
    if isinstance(found, NotAllowedError) and request.method == "GET":
        headers["WWW-Authenticate"] = 'Basic realm="gati", charset="UTF-8"'  # browsers ask for the key then
    return error(found.http_status, _FOLDERS.sub("", str(found)), headers)


def mistake(request: Request, found: Exception) -> Response:
    """What is our own fault; the log has the cause, the client gets none of it."""
    _log.error("mistake in a request", exc_info=found, extra={"path": request.url.path})
    return error(500, "internal error; the log has its cause", {})


def error(status: int, message: str, headers: dict[str, str]) -> Response:
    """The body that every error has."""
    return Json({"error": message}, status, headers)


def check_key(request: Request) -> None:
    """Compare keys in constant time; management may have one of its own. Raises `NotAllowedError`.

    A browser, which cannot send headers of its own, may give the key as a password, to read only: it sends
    passwords along with whatever other sites make it ask for.
    """
    config = scheduler_of(request).config
    path: str = request.scope["path"]
    wanted = config.api_key
    if path.startswith(_MANAGEMENT):
        wanted = config.management_key or config.api_key
    if wanted is None or path.startswith(_OPEN):
        return
    given = request.headers.get("x-api-key") or (_password(request) if request.method == "GET" else "")
    if not secrets.compare_digest(given.encode(), wanted.encode()):
        raise NotAllowedError("a key is needed; send it as X-API-Key")


def _password(request: Request) -> str:
    """Of HTTP's Basic authentication, empty where there is none; the name does not matter."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:  # no base64, or no text in it
        return ""
