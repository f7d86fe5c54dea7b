"""The HTTP server of `gati serve`: its address, limits and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from gati.errors import ConfigError
from gati.hosts import address_of
from services.accepting import PatientListener
from services.config import ModelConfig, ServeConfig
from services.http import HttpLimits, http_protocol, places
from services.wire.handshake import renewed_tls, server_tls

_log = logging.getLogger("gati.serve")

_KEEP_ALIVE_S = 75
_OTHER_FILES = 128  # open files other than connections of clients and of replicas
_FILES_OF_PROCESS = 10  # of a replica here: its pipes, socket and locks, and pipes of a spare one
_FILES_OF_CONNECTION = 1  # of a replica elsewhere


def web_server(config: ServeConfig, app: ASGIApp) -> uvicorn.Server:
    """A server for an application, not listening yet.

    **Raises:** `ConfigError` for a certificate that cannot be used, or if too few files may be open.
    """
    limits = _limits(config)
    settings = uvicorn.Config(
        app,
        http=http_protocol(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    settings.load()
    logging.getLogger("uvicorn.error").addFilter(_SELDOM)
    settings.loaded_app = _Forwarded(settings.loaded_app)
    # Instead of uvicorn's own TLS context: its errors for invalid files would not be one line.
    settings.ssl = server_tls(config.certificate, config.certificate_key)
    return _Server(settings, limits)


def renew_certificate(server: uvicorn.Server, config: ServeConfig) -> None:
    """Read the certificate again, for new connections; if it is invalid, the log says why, and it stays."""
    context = renewed_tls(config.certificate, config.certificate_key, _log)
    if context is None:
        return
    server.config.ssl = context
    listeners: list[Any] = server.servers
    for listener in listeners:
        listener.renew(context)


def listen(config: ServeConfig) -> socket.socket:
    """The socket that clients connect to. Raises `ConfigError` if the port or the address cannot be used."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while ")[0]  # Python repeats the address
        of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            f"cannot listen on {address_of(config.host, config.port)} ({why}); "
            + ("choose another --port" if of_port else "--host must be an address of this machine")
        ) from error


@contextlib.asynccontextmanager
async def answering(
    server: uvicorn.Server, listening: socket.socket, drain: Callable[[], Awaitable[None]]
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve during the block; after it, accept no new connections, await `drain`, and end the server.

    Open connections still get their answers while `drain` runs. The task that the block gets ends during it
    only if the server fails.
    """
    running = asyncio.create_task(server.serve([listening]))
    yield running
    for listener in server.servers:
        listener.close()
    await drain()
    server.should_exit = True
    await running


def url_of(config: ServeConfig, listening: socket.socket) -> str:
    """The URL of the server."""
    scheme = "http" if config.certificate is None else "https"
    return f"{scheme}://{address_of(config.host, listening.getsockname()[1])}"


# --------------------------------------------------------------------------------------------------------


class _Seldom(logging.Filter):
    """Lets one warning through each second: clients that do not speak HTTP cause one each."""

    _said_s = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        is_new = record.created - self._said_s >= 1.0 or record.created < self._said_s
        if is_new:
            self._said_s = record.created
        return is_new


_SELDOM = _Seldom()  # one, so that it is added once


class _Forwarded:
    """Uses uvicorn's middleware for proxy headers only for requests that have such headers.

    For other requests it would change nothing, but still parse the client's address each time.
    """

    def __init__(self, middleware: Any) -> None:
        self._middleware, self._app = middleware, middleware.app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        has_headers = any(name.startswith(b"x-forwarded-") for name, _ in scope["headers"])
        answering: ASGIApp = self._middleware if has_headers else self._app
        return answering(scope, receive, send)


class _Server(uvicorn.Server):
    """Accepts connections with `PatientListener`, which also limits TLS handshakes, and handles no signals.

    `gati serve` handles signals itself, so that running requests are answered before anything closes.
    """

    def __init__(self, config: uvicorn.Config, limits: HttpLimits) -> None:
        super().__init__(config)
        self._limits = limits
        self.servers = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets."""
        config = self.config
        await self.lifespan.startup()
        kind: Any = config.http_protocol_class

        def make(waited_s: float) -> asyncio.BaseProtocol:
            made = kind(config=config, server_state=self.server_state, app_state=self.lifespan.state)
            made.waited_s = waited_s
            return made  # type: ignore[no-any-return]

        loop, connections = asyncio.get_running_loop(), self.server_state.connections
        listen_at = partial(
            PatientListener,
            make=make,
            places=lambda: places(connections, self._limits, loop.time()),
            tls=config.ssl,
            handshakes=self._limits.connections,
            handshake_timeout_s=self._limits.head_timeout_s,
        )
        listeners: list[Any] = [listen_at(each) for each in sockets or ()]
        self.servers = listeners
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _limits(config: ServeConfig) -> HttpLimits:
    """The limits on connections, within the number of files that may be open; raises that if needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = 1 if config.certificate is None else 2  # with TLS, as many handshakes may be under way in addition
    others = _OTHER_FILES + sum(_files(model, config) for model in config.models.values())
    wanted = each * config.most_connections + others
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    fits = config.most_connections if soft == resource.RLIM_INFINITY else (soft - others) // each
    if fits < 1:
        raise ConfigError(f"only {soft} files may be open, {others + each} are needed; raise ulimit -n")
    return HttpLimits(
        min(config.most_connections, fits),
        config.largest_head_bytes,
        config.head_timeout_s,
        config.body_timeout_s,
        config.largest_held_bytes,
    )


def _files(model: ModelConfig, config: ServeConfig) -> int:
    """The number of files that this process has open for the replicas of a model."""
    if model.address is not None:
        return _FILES_OF_CONNECTION
    replicas = model.replicas_max or model.replicas or config.replicas or 1
    return replicas * (_FILES_OF_PROCESS if config.ray is None else _FILES_OF_CONNECTION)
