"""Cross-site requests: sent by a page of another site through the browser of a trusted user.

Browsers report where a request comes from: `Sec-Fetch-Site`, or at least `Origin` for all methods that do
not only read. Without keys, `Host` is checked as well: to the browser, a page whose host name points here
(DNS rebinding) has the same origin, but it can only send its own host name.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.requests import Request

from gati.errors import ForbiddenError, MediaTypeError
from services.hosts import is_loopback

_READING = ("GET", "HEAD", "OPTIONS")
_OWN = ("same-origin", "none")  # none: typed by the user
_JSON = ("application/json", "text/json")


def check_site(request: Request) -> None:
    """Refuse requests that another site's page made a browser send. Raises `ForbiddenError`.

    Other programs send neither header, and pass. So do reads, because the page cannot see the answer.
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
        raise ForbiddenError("sent by a page of another site (its Origin is not this Host)")


def check_host(request: Request, allowed: Iterable[str]) -> None:
    """Refuse host names that are neither this machine's own nor allowed. Raises `ForbiddenError`."""
    given = request.headers.get("host")
    if given is not None and not _is_allowed(given, tuple(allowed)):  # browsers always send it
        raise ForbiddenError(
            f"no server of the name {given[:80]!r} without a key; ask for 127.0.0.1, add it to `hosts`, or "
            "set a key"
        )


def check_json_content(request: Request) -> None:
    """Refuse content types that a form on any page could send. Raises `MediaTypeError`."""
    kind = request.headers.get("content-type")
    if kind is None:
        if request.headers.get("origin") or request.headers.get("sec-fetch-site"):
            raise MediaTypeError("management needs Content-Type: application/json")
        return
    if kind.partition(";")[0].strip().lower() not in _JSON:
        raise MediaTypeError(f"management needs Content-Type: application/json, got {kind[:60]!r}")


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
