"""`gati.guard.roster` for the versions of a served model."""

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
    """Not thread-safe: call from the event loop.

    `settings` opens proven settings. `on_change` is called with a post that starts to answer, or answers by
    another setting; `on_takeover` with a version that was proven.
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
        """The name of its version."""
        return post.version.name

    def begin_opening(self, post: Post[Answering], level: int, kind: RosterChange, counted: str) -> None:
        """Open a setting in the loader's thread."""
        self._settings.begin(self, post, level, kind, counted)

    def figures(self, post: Post[Answering]) -> Composition | None:
        """Its composition, whose figures are shown."""
        return post.deployed.composition

    def on_serving(self, post: Post[Answering]) -> None:
        """Try its lookups again."""
        self._on_change(post)

    def on_promoted(self, post: Post[Answering]) -> None:
        """Report that it answers from now on."""
        self._on_takeover(post)

    def on_given_up(self, post: Post[Answering]) -> None:
        """Nothing: it stays loaded and can be activated again."""
