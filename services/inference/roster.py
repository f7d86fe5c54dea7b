"""The versions of a served model that answer and that wait: `gati.guard.roster`, with settings that open."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gati.composition.composition import Composition
from gati.guard.posts import Post
from gati.guard.roster import Roster, RosterChange
from services.inference.following import Answering
from services.inference.proven_settings import ProvenSettings

__all__ = ["ServedRoster"]

_log = logging.getLogger("gati.inference")


class ServedRoster(Roster[Answering]):
    """Its methods belong to the event loop's thread.

    `settings` opens those that are proven. `on_change` hears of a post
    that answers from now on, or by another setting, `on_takeover` of a version that was proven.
    """

    def __init__(
        self,
        serving: Post[Answering],
        *,
        settings: ProvenSettings,
        on_change: Callable[[Post[Answering]], None],
        on_takeover: Callable[[Post[Answering]], None],
    ) -> None:
        self._settings = settings
        self._on_change, self._on_takeover = on_change, on_takeover
        super().__init__(serving)

    def tell(self, kind: RosterChange, message: str) -> None:
        """One line in the log."""
        level = logging.WARNING if kind in ("alarm", "tightened") else logging.INFO
        _log.log(level, "what answers", extra={"change": kind, "reason": message})

    def name_of(self, post: Post[Answering]) -> str:
        """What its version is called."""
        return post.version.name

    def begin_opening(self, post: Post[Answering], level: int, kind: RosterChange, counted: str) -> None:
        """Open it in the loader's thread."""
        self._settings.begin(self, post, level, kind, counted)

    def figures(self, post: Post[Answering]) -> Composition | None:
        """Those of its composition."""
        return post.deployed.composition

    def on_serving(self, post: Post[Answering]) -> None:
        """Its lookups are given a try."""
        self._on_change(post)

    def on_promoted(self, post: Post[Answering]) -> None:
        """It answers from now on."""
        self._on_takeover(post)

    def on_given_up(self, post: Post[Answering]) -> None:
        """It stays loaded, and can be activated again."""
