"""Replies that every endpoint gives in the same way: refusals and mistakes."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gati.errors import GatiError, NotAllowedError
from services.scheduler.scheduler import scheduler_of

_log = logging.getLogger("gati.rest")

_FOLDERS = re.compile(r"(?:/[\w.@+ -]+)+/")  # of paths in messages: not for clients


class Json(Response):
    """A JSON document, numpy arrays and all."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The document as bytes."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def refused(request: Request, found: GatiError) -> Response:
    """The reply of a refusal: its status, one line, and when to retry."""
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
    return error(found.http_status, without_folders(str(found)), headers)


def without_folders(message: str) -> str:
    """A message for clients, whom it does not concern where files lie."""
    return _FOLDERS.sub("", message)


def mistake(request: Request, found: Exception) -> Response:
    """The reply to an internal error; the log has the cause, the client does not see it."""
    _log.error("mistake in a request", exc_info=found, extra={"path": request.url.path})
    return error(500, "internal error; the log has its cause", {})


def error(status: int, message: str, headers: dict[str, str]) -> Response:
    """The body that every error has."""
    return Json({"error": message}, status, headers)
