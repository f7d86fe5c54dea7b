"""Admission: the origin, host name and key of a request, before its body is read."""

from __future__ import annotations

import base64

from starlette.requests import Request

from gati.errors import ConfigError, NotAllowedError
from gati.hosts import is_loopback
from services.config import ServeConfig
from services.scheduler.keys import Key, KeyRing, Right
from services.scheduler.origin import check_host, check_json_content, check_site

_OPEN = ("/v2/health/", "/metrics")  # for monitoring, without a key
MANAGEMENT = "/v2/repository/"  # how the paths of its requests begin
_NOBODY_MANAGES = (
    "no key of this server may manage; set GATI_SERVE_MANAGEMENT_KEY, or give a key in --keys the right "
    "'manage'"
)


def check_exposure(config: ServeConfig) -> None:
    """Raise `ConfigError` if a server without a key would listen on an address that others can reach."""
    if config.api_key is None and config.keys_file is None and not is_loopback(config.host):
        raise ConfigError(
            f"without a key only this machine has access, and {config.host} is open to others; set "
            "GATI_SERVE_API_KEY (and GATI_SERVE_MANAGEMENT_KEY) or --keys, or leave --host at 127.0.0.1"
        )


def admit(request: Request, config: ServeConfig, keys: KeyRing) -> Key | None:
    """Admit a request and return its key, or None if no key is required.

    **Raises:** `NotAllowedError`, `ForbiddenError`, `MediaTypeError`.
    """
    path: str = request.scope["path"]
    if not keys.asks:
        check_host(request, (config.host, *config.hosts))
    elif config.hosts and not path.startswith(_OPEN):  # probes and Prometheus name a pod by its address
        check_host(request, config.hosts)
    check_site(request)
    key = _key(request, path, keys)
    if path.startswith(MANAGEMENT):
        check_json_content(request)
    return key


def _key(request: Request, path: str, keys: KeyRing) -> Key | None:
    """The key of a request, or None if no key is required. Raises `NotAllowedError`.

    A user cannot set headers in a browser, so a GET request may send the key as the password of HTTP Basic
    authentication. Other methods may not: a browser also attaches the password to requests that pages of
    other sites make it send.
    """
    right = _right(request.method, path)
    if path.startswith(_OPEN) or not (keys.guards_management if right == "manage" else keys.asks):
        return None
    given = request.headers.get("x-api-key") or _token(request)
    if not given and request.method == "GET":
        given = _password(request)
    key = keys.find(given)
    if key is None:
        raise NotAllowedError("the API key is missing or wrong; send it as X-API-Key")
    if right == "manage" and not keys.manages:
        raise NotAllowedError(_NOBODY_MANAGES)
    if right not in key.rights:
        raise NotAllowedError(f"the key '{key.name}' may not {right}; send another as X-API-Key")
    return key


def _right(method: str, path: str) -> Right:
    if path.startswith(MANAGEMENT):
        return "manage"
    return "read" if method in ("GET", "HEAD", "OPTIONS") else "infer"


def _token(request: Request) -> str:
    """The token of `Authorization: Bearer`, which OpenAI's clients send; no browser does by itself."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _password(request: Request) -> str:
    """The password of HTTP Basic authentication, or an empty string; the user name is ignored."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:  # not base64, or not UTF-8
        return ""
