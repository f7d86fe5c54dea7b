"""Opens proven settings of loaded versions in the loader's thread, while other settings answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor

from gati.errors import first_line
from gati.guard.posts import Post
from gati.guard.roster import Roster, RosterChange
from gati.versions.setting import Setting
from services.inference.following import Answering
from services.inference.opening import Opener
from services.inference.queue import RequestQueue

_log = logging.getLogger("gati.inference")


class ProvenSettings:
    """The settings of all loaded versions. Not thread-safe: call from the event loop."""

    def __init__(self, opener: Opener, loader: Executor, capacity: int) -> None:
        self._opener = opener
        self._loader = loader
        self._capacity = capacity
        self._settings: dict[Answering, Sequence[Setting]] = {}
        self._opening: set[asyncio.Task[None]] = set()

    def add(self, version: Answering, settings: Sequence[Setting]) -> None:
        """Add the settings of a loaded version."""
        self._settings[version] = settings

    def forget(self, version: Answering) -> None:
        """Remove the settings of an unloaded version."""
        self._settings.pop(version, None)

    async def open_known(self, post: Post[Answering]) -> None:
        """Open the setting that an earlier run proved, if any."""
        level = post.watch.level
        if post.level == level:
            return
        try:
            post.open[level] = await self._opened(post, level)
        except Exception as error:  # of any type, like the failures of engines; the base model answers
            _told(post, error)

    def begin(
        self, roster: Roster[Answering], post: Post[Answering], level: int, kind: RosterChange, counted: str
    ) -> None:
        """Open a setting in the background, then report it to `roster` with `kind` and `counted`."""
        task = asyncio.create_task(self._open(roster, post, level, kind, counted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def close(self) -> None:
        """Wait for settings that are being opened."""
        if self._opening:
            await asyncio.wait(self._opening)

    async def _open(
        self, roster: Roster[Answering], post: Post[Answering], level: int, kind: RosterChange, counted: str
    ) -> None:
        try:
            answering = await self._opened(post, level)
        except Exception as error:
            if not post.version.gone:
                _told(post, error)
                roster.not_opened(post)
            return
        if post.version.gone:
            await answering.close()
        else:
            roster.opened(post, level, answering, kind, counted)

    async def _opened(self, post: Post[Answering], level: int) -> Answering:
        setting = self._settings[post.version][level - 1]
        loop = asyncio.get_running_loop()
        opened = await loop.run_in_executor(self._loader, self._opener.open_setting, setting)
        queue = RequestQueue(opened.runner, capacity=self._capacity, times=opened.times)
        return Answering(post.version.name, opened.engine, queue, setting.composition)


def _told(post: Post[Answering], error: Exception) -> None:
    extra = {"version": post.version.name, "reason": first_line(error)}
    _log.warning("a proven setting cannot be opened", extra=extra)
