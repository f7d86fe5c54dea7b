"""Run an inference service: `python -m services.inference SETTINGS`, with its settings as JSON.

It writes `{"listening": ADDRESS}` to stdout once it accepts calls, and then loads its model. It serves until
SIGTERM or, if `gati serve` started it, until its stdin closes: then it refuses new requests, answers those it
has accepted, and exits. At SIGHUP it reads its certificate again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from gati.errors import UnavailableError
from services.inference.service import InferenceService
from services.inference.settings import InferenceSettings
from services.listening import listen, renew_certificate
from services.process import end_after, ended, run
from services.wire.codec import Service
from services.wire.gen import Inference
from services.wire.server import WireServer

_log = logging.getLogger("gati.inference")

_GRACE_S = 10.0  # after the drain: a thread that hangs, as one that loads a model may, is not waited for


def main() -> int:
    """Serve with the settings from the command line; returns the exit status."""
    return run(InferenceSettings, lambda settings: f"inference:{settings.label}", _serve)


async def _serve(settings: InferenceSettings) -> None:
    listening: list[WireServer] = []

    def reload() -> None:
        for each in listening:
            renew_certificate(each, settings)

    waiting = asyncio.create_task(ended(with_stdin=settings.end_with_stdin, reload=reload))
    service = InferenceService(settings)
    calls = ("infer", "cancel", "load", "activate", "unload", "describe", "health", "statistics")
    handlers = {name: getattr(service, name) for name in calls}
    server, address = await listen(Service(Inference), handlers, settings)
    listening.append(server)
    print(json.dumps({"listening": address}), flush=True)
    starting = asyncio.create_task(service.start())
    await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()  # a model that does not load ends the process
    await waiting
    _log.info("draining")
    end_after(settings.drain_timeout_s + _GRACE_S)
    try:
        async with asyncio.timeout(settings.drain_timeout_s):
            await asyncio.gather(service.drain(), server.drain(settings.drain_timeout_s))
    except TimeoutError:
        raise UnavailableError(
            f"'{settings.label}' ends with work unfinished: its requests, or loading a version, took longer "
            f"than drain_timeout_s = {settings.drain_timeout_s:g}; increase it"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
