"""Where a service takes calls: at a Unix socket that only its own user may use, or at an address."""

from __future__ import annotations

from services.process import ProcessSettings
from services.wire.client import UNIX
from services.wire.server import WireServer

__all__ = ["listen"]


async def listen(server: WireServer, settings: ProcessSettings) -> str:
    """Begin to listen as the settings say, and return the address for those who connect."""
    if settings.socket is not None:
        await server.start_unix(settings.socket)
        return f"{UNIX}{settings.socket}"
    port = await server.start(settings.host, settings.port)
    return f"{settings.host}:{port}"
