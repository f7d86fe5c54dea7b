"""Replies of all endpoints: JSON, refused requests and internal errors."""

from __future__ import annotations

import logging
import math
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gati.errors import GatiError, NotAllowedError
from services.scheduler.reasons import without_folders

_log = logging.getLogger("gati.rest")

JSON, BINARY = b"application/json", b"application/octet-stream"


class Json(Response):
    """A JSON document, which may contain numpy arrays."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the document as bytes."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


class Made(Response):
    """A reply from a complete body and headers, which are neither copied nor checked."""

    def __init__(
        self, content: bytes, media_type: bytes, *headers: tuple[bytes, bytes], status: int = 200
    ) -> None:
        self.status_code, self.body, self.background = status, content, None
        length = b"%d" % len(content)
        self.raw_headers = [(b"content-length", length), (b"content-type", media_type), *headers]


def refused(request: Request, found: GatiError) -> Response:
    """Return the reply to a refused request: status, a message of one line, and when to retry."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("refused", extra={"path": request.scope["path"], "reason": str(found)})
    headers = []
    retry_after_s = getattr(found, "retry_after_s", None)
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after_s))))
        headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(1e3 * retry_after_s))))
    if isinstance(found, NotAllowedError):
        # for a page, a browser then asks its user for the key
        asks = b'Basic realm="gati", charset="UTF-8"' if request.method == "GET" else b'Bearer realm="gati"'
        headers.append((b"www-authenticate", asks))
    return error(found.http_status, without_folders(str(found)), *headers)


def mistake(request: Request, found: Exception) -> Response:
    """Return the reply to an internal error. The cause is logged, but not sent to the client."""
    _log.error("unexpected error in a request", exc_info=found, extra={"path": request.scope["path"]})
    return error(500, "internal error; the log has its cause")


def error(status: int, message: str, *headers: tuple[bytes, bytes]) -> Response:
    """Return the reply for an error."""
    return Made(orjson.dumps({"error": message}), JSON, *headers, status=status)
