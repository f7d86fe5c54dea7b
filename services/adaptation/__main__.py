"""Run the adaptation service: `python -m services.adaptation SETTINGS`, with its settings as JSON.

It writes `{"listening": ADDRESS}` to stdout when it accepts calls. It exits on SIGTERM or, if `gati serve`
started it, when its stdin closes. If it is killed, nothing is lost: samples are in the record store, and
versions in the repository.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys

from gati.priority import give_way
from services.adaptation.settings import AdaptationSettings
from services.listening import listen
from services.process import ended, run
from services.wire.codec import Service
from services.wire.gen import Adaptation

_log = logging.getLogger("gati.adaptation")


def main() -> int:
    """Serve with the settings from the command line; returns the exit status."""
    return run(AdaptationSettings, lambda settings: "adaptation", _serve)


async def _serve(settings: AdaptationSettings) -> None:
    give_way(settings.niceness)
    # Only now: threads that these imports start, such as torch's, do not give way later.
    from services.adaptation.adaptations import Adaptations
    from services.adaptation.model import ModelAdaptation

    adaptations = Adaptations(settings, ModelAdaptation)
    calls = ("adapt", "status", "health")
    handlers = {name: getattr(adaptations, name) for name in calls}
    server, address = await listen(Service(Adaptation), handlers, settings)
    print(json.dumps({"listening": address}), flush=True)
    stopped = asyncio.create_task(ended(with_stdin=settings.end_with_stdin))
    adaptations.start()
    _log.info("ready", extra={"models": [model.name for model in settings.models]})
    looking = asyncio.create_task(adaptations.keep_looking())
    await asyncio.wait((stopped, looking), return_when=asyncio.FIRST_COMPLETED)
    if looking.done():
        looking.result()
    await server.drain(1.0)
    adaptations.close()
    os._exit(0)  # do not wait for a training in progress: it stores nothing before publication


if __name__ == "__main__":
    sys.exit(main())
