"""Refuses cross-site requests, which a page of another site sends through the browser of a trusted user.

Browsers report where a request comes from in `Sec-Fetch-Site`, or at least in `Origin` for all methods that
are not read-only. Without keys, `Host` is checked as well: for the browser, a page whose host name resolves
to this machine (DNS rebinding) has the same origin, but `Host` still contains its own name.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.requests import Request

from gati.errors import ForbiddenError, MediaTypeError
from gati.hosts import is_loopback

_READING = ("GET", "HEAD", "OPTIONS")
_OWN = ("same-origin", "none")  # none: typed by the user
_JSON = ("application/json", "text/json")


def check_site(request: Request) -> None:
    """Refuse requests that another site's page made a browser send. Raises `ForbiddenError`.

    Programs other than browsers send neither header and are accepted. So are reads, because the page cannot
    see the answer.
    """
    if request.method in _READING:
        return
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        if site.lower() not in _OWN:
            raise ForbiddenError(f"sent by a page of another site (Sec-Fetch-Site: {site[:20]})")
        return
    origin = request.headers.get("origin")
    if origin is not None and _netloc(origin) != request.headers.get("host", "").lower():
        raise ForbiddenError("sent by a page of another site (Origin does not match Host)")


def check_host(request: Request, allowed: Iterable[str]) -> None:
    """Refuse host names that are neither this machine's own nor allowed. Raises `ForbiddenError`."""
    given = request.headers.get("host")
    if given is not None and not _is_allowed(given, tuple(allowed)):  # browsers always send it
        raise ForbiddenError(
            f"host name {given[:80]!r} is not allowed without a key; use 127.0.0.1, add the name to `hosts`, "
            "or set a key"
        )


def check_json_content(request: Request) -> None:
    """Refuse content types that a form on any page could send. Raises `MediaTypeError`."""
    kind = request.headers.get("content-type")
    if kind is None:
        if request.headers.get("origin") or request.headers.get("sec-fetch-site"):
            raise MediaTypeError("management requests need Content-Type: application/json")
        return
    if kind.partition(";")[0].strip().lower() not in _JSON:
        raise MediaTypeError(f"management requests need Content-Type: application/json, got {kind[:60]!r}")


@lru_cache(256)
def _is_allowed(given: str, allowed: tuple[str, ...]) -> bool:
    try:
        name = urlsplit(f"//{given}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name in {each.strip("[]").lower() for each in allowed}


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
