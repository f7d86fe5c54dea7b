"""Run the adaptation service: `python -m services.adaptation SETTINGS`, with its settings as JSON.

It writes `{"listening": ADDRESS}` to stdout when it takes calls, and ends with SIGTERM, or with its stdin
where `gati serve` started it. Killed at any moment it loses nothing: samples are in the record store,
versions in the repository.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gati.errors import NotFoundError, UnavailableError
from services.adaptation.model import ModelAdaptation
from services.adaptation.settings import AdaptationSettings
from services.again import keep_on
from services.listening import listen
from services.process import ended, run
from services.wire.codec import Service
from services.wire.gen import Adaptation
from services.wire.gen.ttypes import Health

_LONGEST_PAUSE_S = 60.0

_log = logging.getLogger("gati.adaptation")


def main() -> int:
    """Serve as the settings on the command line say; returns the exit status."""
    return run(AdaptationSettings, lambda settings: "adaptation", _serve)


class _Adaptations:
    """The calls of `service Adaptation`; all work on models is done in one thread."""

    def __init__(self, settings: AdaptationSettings) -> None:
        self._settings = settings
        self._models: dict[str, ModelAdaptation] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gati-adaptation")

    async def start(self) -> None:
        """Open every model. Raises what opening raises."""
        for model in self._settings.models:
            self._models[model.name] = await self._run(ModelAdaptation, model, self._settings)

    async def keep_looking(self) -> None:
        """Look after every model, again and again, until cancelled; one that fails stops no other."""
        await asyncio.gather(*map(self._keep_looking, self._models.values()))

    async def _keep_looking(self, model: ModelAdaptation) -> None:
        every_s = self._settings.look_every_s
        what = f"adaptation of '{model.name}'"
        await keep_on(what, lambda: self._run(model.look), every_s=every_s, longest_s=_LONGEST_PAUSE_S)

    def close(self) -> None:
        """Remove local files."""
        for model in self._models.values():
            model.close()

    async def adapt(self, model: str) -> Any:
        """Look for better caches now."""
        found = self._model(model)
        await self._run(lambda: found.look(asked=True))
        return found.status()

    async def status(self) -> Any:
        """How every model is."""
        return [model.status() for model in self._models.values()]

    async def health(self) -> Any:
        """Ready once every model is open."""
        ready = len(self._models) == len(self._settings.models)
        return Health(ready=ready, draining=False, state="serving" if ready else "loading")

    def _model(self, name: str) -> ModelAdaptation:
        if len(self._models) < len(self._settings.models):
            raise UnavailableError("the models are being opened", retry_after_s=1.0)
        if name not in self._models:
            raise NotFoundError(f"no model '{name}'; there are: {', '.join(self._models)}")
        return self._models[name]

    async def _run(self, work: Any, *arguments: Any) -> Any:
        def quietly() -> Any:
            import torch

            torch.set_num_threads(self._settings.threads)
            return work(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._thread, quietly)


async def _serve(settings: AdaptationSettings) -> None:
    if hasattr(os, "nice"):
        os.nice(settings.niceness)
    adaptations = _Adaptations(settings)
    calls = ("adapt", "status", "health")
    handlers = {name: getattr(adaptations, name) for name in calls}
    server, address = await listen(Service(Adaptation), handlers, settings)
    print(json.dumps({"listening": address}), flush=True)
    stopped = asyncio.create_task(ended(with_stdin=settings.end_with_stdin))
    await adaptations.start()
    _log.info("ready", extra={"models": [model.name for model in settings.models]})
    looking = asyncio.create_task(adaptations.keep_looking())
    await asyncio.wait((stopped, looking), return_when=asyncio.FIRST_COMPLETED)
    if looking.done():
        looking.result()
    await server.drain(1.0)
    adaptations.close()
    os._exit(0)  # a training under way is not waited for: nothing it has is kept before it is published


if __name__ == "__main__":
    sys.exit(main())
