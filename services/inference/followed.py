"""Follows the active version of a model repository: what is published and activated there is served here."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from gati.errors import GatiError, NotFoundError, StorageError, first_line
from gati.versions.repository import ModelRepository
from services.again import keep_on
from services.inference.versions import Versions
from services.scratch import Scratch

__all__ = ["Followed"]

_LONGEST_PAUSE_S = 300.0

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
        """Look every so many seconds, and less often while that fails, until cancelled."""
        await keep_on("repository", self._look, every_s=every_s, longest_s=_LONGEST_PAUSE_S)

    async def look(self) -> None:
        """Serve the active version, if it is another. What goes wrong leaves the one that serves."""
        try:
            await self._look()
        except Exception as error:  # the repository may be on any file system, and that may be away
            trace = None if isinstance(error, GatiError) else error
            _log.warning("the repository is not read", extra={"reason": first_line(error)}, exc_info=trace)

    async def _look(self) -> None:
        token = await asyncio.to_thread(self._repository.active_token, self._model)
        if token == self._token:
            return
        number = await asyncio.to_thread(self._repository.active, self._model)
        try:
            if number is not None:
                await self._serve(str(number))
        except StorageError:  # away: the same version may come later
            raise
        except GatiError as error:  # it will never serve; the next that is activated may
            _log.warning("the repository's version is not served", extra={"reason": str(error)})
        self._token = token

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
        scratch = await asyncio.to_thread(Scratch, "version")
        folder = scratch.path / name
        try:
            await asyncio.to_thread(self._repository.fetch, self._model, int(name), folder)
            await self._versions.load(name, folder=folder)
            self._own.add(name)
        finally:
            await asyncio.to_thread(scratch.close)
