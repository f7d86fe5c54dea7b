"""Follows the active version of a model repository: what is published and activated there is served here."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path

from gati.adapt.repository import ModelRepository
from gati.errors import GatiError
from services.inference.versions import Versions

__all__ = ["Followed"]

_log = logging.getLogger("gati.inference")


class Followed:
    """Looks for another active version now and then, loads it beside the one that serves, lets it answer."""

    def __init__(self, url: str, model: str, versions: Versions) -> None:
        self._repository = ModelRepository(url)
        self._model = model
        self._versions = versions
        self._token = ""
        self._serving: str | None = None

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
                await self._serve(number)
            self._token = token
        except GatiError as error:
            _log.warning("the repository's version is not served", extra={"reason": str(error)})

    async def _serve(self, number: int) -> None:
        name = str(number)
        if name == self._serving:
            return
        folder = Path(tempfile.mkdtemp(prefix="gati-version-"))
        try:
            await asyncio.to_thread(self._repository.fetch, self._model, number, folder / name)
            await self._versions.load(name, folder=folder / name)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        before, self._serving = self._serving, name
        self._versions.activate(name)
        if before is not None:
            self._versions.unload(before)
