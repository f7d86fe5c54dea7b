"""Which version served when the last run ended, and which was on trial: only these keep their proofs.

Any other version was proven on requests of an earlier time. One that is brought back proves itself again, on
a further share of delta (`gati.guard.roster.Roster.bring_back`).
"""

from __future__ import annotations

import math
from typing import Any

from gati.guard.posts import Post
from gati.guard.roster import Roster
from gati.guard.standing import Standing, identity_of
from services.inference.following import Answering

__all__ = ["LastRun"]

_PART = "answering"


class LastRun:
    """Kept in the file of `standing`. Not thread-safe: call from the event loop."""

    def __init__(self, standing: Standing) -> None:
        kept = standing.kept(_PART, math.inf)
        self._kept: dict[str, Any] = kept if isinstance(kept, dict) else {}
        self._left = {each for each in self._kept.values() if each is not None}
        self._roster: Roster[Answering] | None = None
        standing.keep(_PART, self._state)

    def goes_on(self, post: Post[Answering]) -> bool:
        """Whether the version keeps its proof, having served or been on trial when the last run ended."""
        return _identity(post) in self._left

    def waited(self, post: Post[Answering]) -> bool:
        """Whether it keeps its proof, and was on trial."""
        return self.goes_on(post) and self._kept.get("serving") != _identity(post)

    @property
    def is_known(self) -> bool:
        """Whether there was a last run, and no version was activated in this one yet."""
        return self._roster is None and bool(self._kept)

    def followed(self, roster: Roster[Answering], post: Post[Answering]) -> None:
        """Call when a version is activated, or proven, in this run: from now on this run counts."""
        self._roster = roster
        self._left = self._left - {_identity(post)} if self.goes_on(post) else set()

    def _state(self) -> dict[str, Any]:
        roster = self._roster
        if roster is None:
            return self._kept
        trial = None if roster.trial is None else _identity(roster.trial)
        return {"serving": _identity(roster.serving), "trial": trial}


def _identity(post: Post[Answering]) -> str | None:
    """The identity of its caches, as published; None for a version without any."""
    composition = post.version.composition
    return None if composition is None else identity_of(composition)
