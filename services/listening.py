"""Listens on a Unix socket, for this user only, or on an address."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from gati.errors import ConfigError
from gati.hosts import address_of, is_loopback
from services.process import ProcessSettings
from services.wire.client import UNIX
from services.wire.codec import Service
from services.wire.handshake import read_secret, renewed_tls, server_tls
from services.wire.server import Handler, WireServer

_log = logging.getLogger("gati.wire")


async def listen(
    service: Service, handlers: Mapping[str, Handler], settings: ProcessSettings
) -> tuple[WireServer, str]:
    """Start to listen as configured; returns the server and the address for clients.

    **Raises:** `ConfigError` if the address is not available, or if other machines could connect without a
    secret.
    """
    if settings.socket is not None:
        server = WireServer(service, handlers)
        await server.start_unix(settings.socket)
        return server, f"{UNIX}{settings.socket}"
    secret = read_secret(settings.secret_file)
    if secret is None and not is_loopback(settings.host):
        raise ConfigError(
            f"without a secret only this machine has access, but {settings.host} is open to others; set "
            "secret_file here, and in [models.NAME] in the caller's configuration"
        )
    tls = server_tls(settings.certificate, settings.certificate_key)
    server = WireServer(service, handlers, secret=secret, tls=tls)
    try:
        port = await server.start(settings.host, settings.port)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"cannot listen on {address_of(settings.host, settings.port)} ({why}); choose another port"
        ) from error
    return server, address_of(settings.host, port)


def renew_certificate(server: WireServer, settings: ProcessSettings) -> None:
    """Read the certificate again, for new connections; if it is invalid, the log says why, and it stays."""
    tls = renewed_tls(settings.certificate, settings.certificate_key, _log)
    if tls is not None:
        server.renew(tls)
