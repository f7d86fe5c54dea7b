"""Follows a model repository and serves its active version."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from gati.errors import GatiError, NotFoundError, StorageError
from gati.versions.repository import ModelRepository
from services.again import keep_on
from services.inference.loaded import LoadedVersion, TooManyVersionsError
from services.inference.versions import Versions
from services.logs import log_failure
from services.scratch import Scratch

_LONGEST_PAUSE_S = 300.0

_log = logging.getLogger("gati.inference")


class Followed:
    """Polls the repository, loads a new active version while the current one serves, and activates it.

    The new version answers once it is proven; until then the current one does.
    """

    def __init__(self, url: str, model: str, versions: Versions) -> None:
        self._repository = ModelRepository(url)
        self._model = model
        self._versions = versions
        self._token = ""
        self._wanted: str | None = None
        self._own: set[str] = set()  # versions loaded from the repository

    async def keep_looking(self, every_s: float) -> None:
        """Poll every `every_s` seconds, with back-off after failures, until cancelled."""
        await keep_on("repository", self._look, every_s=every_s, longest_s=_LONGEST_PAUSE_S)

    async def look(self) -> None:
        """Serve the active version, if it has changed; after an error the current one stays."""
        try:
            await self._look()
        except Exception as error:  # of any type: any file system may hold the repository
            log_failure(_log, "cannot read the repository", error)

    async def _look(self) -> None:
        token = await asyncio.to_thread(self._repository.active_token, self._model)
        if token == self._token:
            return
        number = await asyncio.to_thread(self._repository.active, self._model)
        try:
            if number is not None:
                await self._go_on(besides=str(number))
                await self._serve(str(number))
        except (StorageError, TooManyVersionsError):  # try the same version again later
            raise
        except GatiError as error:  # permanent: wait for the next version
            _log.warning("cannot serve the repository's version", extra={"reason": str(error)})
        self._token = token

    def tidy(self) -> None:
        """Unload versions from the repository that neither answer nor are on trial."""
        needed = {self._versions.active.name, self._wanted}
        for name in sorted(self._own - needed):
            self._own.discard(name)
            with suppress(NotFoundError):  # an operator has unloaded it already
                self._versions.unload(name)

    async def _go_on(self, besides: str) -> None:
        """Go on with what served when the last run ended: the active version may wait for its proof."""
        name = self._versions.last_run.served
        if name is None or name == besides or not name.isdecimal():
            return
        try:
            version = await self._load(name)
            if self._versions.last_run.goes_on(version.post):  # else another one, of that name only
                self._versions.activate(name)
        except Exception as error:  # of any type: it does not keep the active version from being served
            log_failure(_log, "cannot go on with the version that served before", error)

    async def _serve(self, name: str) -> None:
        if name == self._wanted:
            return
        if name not in self._own:
            try:
                await self._load(name)
            except TooManyVersionsError:
                if self._wanted in (None, self._versions.active.name):
                    raise
                await self._load_instead(name, self._wanted)
        self._wanted = name
        self._versions.activate(name)
        self.tidy()

    async def _load_instead(self, name: str, trial: str) -> None:
        """Load a version in place of the wanted one, whose trial goes on if the other cannot be served."""
        pending = self._versions.pending  # a trial may have ended, or an operator have activated another one
        on_trial = pending is not None and pending.name == trial
        active = self._versions.active.name
        self._wanted = None
        self.tidy()
        try:
            await self._load(name)
        except (StorageError, TooManyVersionsError):  # it is tried again, and ends the trial anyway
            raise
        except GatiError:
            if on_trial:
                await self._resume(trial, active)
            raise

    async def _resume(self, trial: str, active: str) -> None:
        """Go on with a trial, whose evidence was kept, unless an operator has activated another version."""
        try:
            await self._load(trial)
            if self._versions.pending is None and self._versions.active.name == active:
                self._wanted = trial
                self._versions.activate(trial)
            else:
                self.tidy()
        except Exception as error:  # of any type: it does not hide why the other version cannot be served
            log_failure(_log, "cannot load the version on trial again", error)

    async def _load(self, name: str) -> LoadedVersion:
        scratch = await asyncio.to_thread(Scratch, "version")
        folder = scratch.path / name
        try:
            await asyncio.to_thread(self._repository.fetch, self._model, int(name), folder)
            version = await self._versions.load(name, folder=folder)
        finally:
            await asyncio.to_thread(scratch.close)
        self._own.add(name)  # not before, as `tidy` may be called meanwhile
        return version
