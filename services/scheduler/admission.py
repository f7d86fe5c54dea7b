"""Who may ask: where a request comes from, what it says it is, and its key. Its body is not read yet."""

from __future__ import annotations

import base64
import secrets

from starlette.requests import Request

from gati.errors import ConfigError, NotAllowedError
from services.config import ServeConfig
from services.hosts import is_loopback
from services.scheduler.origin import check_host, check_json_content, check_site

__all__ = ["admit", "check_exposure"]

_OPEN = ("/v2/health/", "/metrics")  # for those who watch, without a key
_MANAGEMENT = "/v2/repository/"


def check_exposure(config: ServeConfig) -> None:
    """Refuse to listen where others can reach a server without a key. Raises `ConfigError`."""
    if config.api_key is None and not is_loopback(config.host):
        raise ConfigError(
            f"without a key only this machine may ask, and {config.host} is for others, too; set "
            "GATI_SERVE_API_KEY (and GATI_SERVE_MANAGEMENT_KEY), or leave --host at 127.0.0.1"
        )


def admit(request: Request, config: ServeConfig) -> None:
    """Let a request in. Raises `NotAllowedError`, `ForbiddenError`, `MediaTypeError`."""
    path: str = request.scope["path"]
    if config.api_key is None:
        check_host(request, (config.host, *config.hosts))
    elif config.hosts:
        check_host(request, config.hosts)
    check_site(request)
    _check_key(request, path, config)
    if path.startswith(_MANAGEMENT):
        check_json_content(request)


def _check_key(request: Request, path: str, config: ServeConfig) -> None:
    """Compare keys in constant time; management may have one of its own. Raises `NotAllowedError`.

    A browser, which cannot send headers of its own, may give the key as a password, to read only: it sends
    passwords along with whatever other sites make it ask for.
    """
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
