"""Follows the active version of a model repository: what is published and activated there is served here."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from gati.adapt.repository import ModelRepository
from gati.errors import GatiError, NotFoundError
from services.inference.versions import Versions

__all__ = ["Followed"]

_log = logging.getLogger("gati.inference")


class Followed:
    """Looks for another active version now and then, loads it beside the one that serves, lets it answer.

    What is active in the repository answers here once it is proven; until then the version before does.
    """

    def __init__(self, url: str, model: str, versions: Versions) -> None:
        self._repository = ModelRepository(url)
        self._model = model
        self._versions = versions
        self._token = ""
        self._wanted: str | None = None
        self._own: set[str] = set()  # loaded from the repository

    async def keep_looking(self, every_s: float) -> None:
        """Look every so many seconds, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.look()

    async def look(self) -> None:
        """Serve the active version, if it is another. What goes wrong leaves the one that serves."""
        try:
            token = await asyncio.to_thread(self._repository.active_token, self._model)
            if token == self._token:
                return
            number = await asyncio.to_thread(self._repository.active, self._model)
            if number is not None:
                await self._serve(str(number))
            self._token = token
        except GatiError as error:
            _log.warning("the repository's version is not served", extra={"reason": str(error)})

    def tidy(self) -> None:
        """Unload what came from the repository and neither answers nor waits to."""
        needed = {self._versions.active.name, self._wanted}
        for name in sorted(self._own - needed):
            self._own.discard(name)
            with suppress(NotFoundError):  # an operator was faster
                self._versions.unload(name)

    async def _serve(self, name: str) -> None:
        if name == self._wanted:
            return
        if name not in self._own:
            await self._load(name)
        self._wanted = name
        self._versions.activate(name)
        self.tidy()

    async def _load(self, name: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="gati-version-"))
        try:
            await asyncio.to_thread(self._repository.fetch, self._model, int(name), folder / name)
            await self._versions.load(name, folder=folder / name)
            self._own.add(name)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
