"""`gati.guard.roster` for the versions of a served model, and its state across restarts.

The version that served when the last run ended, and the one on trial, keep their proofs. Any other version
was proven on earlier requests: if it is brought back, it must be proven again, with a further share of delta
(`gati.guard.roster.Roster.bring_back`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from gati.composition.composition import Composition
from gati.guard.posts import Post
from gati.guard.roster import Roster, RosterChange
from gati.guard.standing import Standing, identity_of
from gati.guard.watch import Event
from services.inference.following import Answering
from services.inference.proven_settings import ProvenSettings
from services.inference.withdrawn import identity_in, name_of

_log = logging.getLogger("gati.inference")

_PART = "answering"


class LastRun:
    """Which version served, and which was on trial, when the last run ended; saved in the file of `standing`.

    Not thread-safe: call from the event loop.
    """

    def __init__(self, standing: Standing) -> None:
        kept = standing.kept(_PART, math.inf)
        said = kept.items() if isinstance(kept, dict) else ()
        self._kept = {key: each for key, each in said if each is None or isinstance(each, str)}
        self._left = {self._kept.get("serving"), self._kept.get("trial")} - {None}
        self._roster: Roster[Answering] | None = None
        standing.keep(_PART, self._state)

    def goes_on(self, post: Post[Answering]) -> bool:
        """Whether the version keeps its proof, because it served or was on trial when the last run ended."""
        return not self._left.isdisjoint(_names(post))

    def waited(self, post: Post[Answering]) -> bool:
        """Whether the version keeps its proof because it was on trial."""
        return self.goes_on(post) and self._kept.get("serving") not in _names(post)

    @property
    def served(self) -> str | None:
        """The name of the version that served, as long as it may go on and does not serve yet; else None."""
        name = self._kept.get("version")  # missing in older files
        return name if self._kept.get("serving") in self._left else None

    @property
    def is_known(self) -> bool:
        """Whether there was a last run, and no version has been activated or proven in this one yet."""
        return self._roster is None and bool(self._kept)

    def followed(self, roster: Roster[Answering], post: Post[Answering]) -> None:
        """Call when a version is activated or proven in this run, whose state counts from then on."""
        self._roster = roster
        self._left = self._left - _names(post) if self.goes_on(post) else set()

    def answered(self, roster: Roster[Answering]) -> None:
        """Call after an answered request: what served last and does not now keeps its proof no longer."""
        served = self._kept.get("serving")
        if served in self._left:  # `followed` removes it once it serves
            self._left = self._left - {served}
            self._roster = roster  # the next run continues with what serves now

    def _state(self) -> dict[str, Any]:
        roster = self._roster
        if roster is None:
            return self._kept
        trial = None if roster.trial is None else _name(roster.trial)
        serving = roster.serving
        return {"serving": _name(serving), "trial": trial, "version": serving.version.name}


def _name(post: Post[Answering]) -> str | None:
    """Its caches as published, and their promise; None for a version without caches."""
    composition = post.version.composition
    return None if composition is None else name_of(identity_of(composition), composition.accuracy_target)


def _names(post: Post[Answering]) -> set[str | None]:
    """That name, and the identity of the caches alone, as earlier versions of Gati wrote it."""
    name = _name(post)
    return {name} if name is None else {name, identity_in(name)}


class ServedRoster(Roster[Answering]):
    """The roster of a served model. Not thread-safe: call from the event loop.

    `settings` opens proven settings; `last_run` says which versions keep their proofs. `on_change` is called
    with a post that starts to answer or switches to another setting, `on_takeover` with a version on trial
    that takes over because it was proven.
    """

    def __init__(
        self,
        serving: Post[Answering],
        *,
        settings: ProvenSettings,
        last_run: LastRun,
        on_change: Callable[[Post[Answering]], None],
        on_takeover: Callable[[Post[Answering]], None],
    ) -> None:
        self._settings, self._last_run = settings, last_run
        self._on_change, self._on_takeover = on_change, on_takeover
        super().__init__(serving)
        if last_run.goes_on(serving):
            last_run.followed(self, serving)
        elif last_run.is_known:
            serving.bring_back()

    def activate(self, post: Post[Answering], may_hit: Callable[[], bool]) -> bool:
        """Let a version serve from now on, or wait until it is proven; returns whether it serves.

        If it serves, the trial of another one ends, unless it goes on where the last run ended.
        `may_hit` returns whether it may answer early; it is called after outdated proofs were withdrawn.
        """
        waited, goes_on = self._last_run.waited(post), self._last_run.goes_on(post)
        self.come_back(post)
        same = post.of_all is self.serving.of_all  # the same caches, with one proof
        serves = same or (may_hit() and not waited)
        if serves:
            self.serve(post, self.trial if goes_on else None)
        else:
            self.trial = post
        self._last_run.followed(self, post)
        return serves

    def come_back(self, post: Post[Answering]) -> None:
        """Require a new proof of a version that is brought back, unless it keeps that of the last run."""
        if not self._last_run.goes_on(post):
            self.bring_back(post)

    def give_up(self) -> None:
        """As `Roster.give_up`; call it after each answered request."""
        self._last_run.answered(self)
        super().give_up()

    def heard(self, post: Post[Answering], event: Event) -> None:
        """As `Roster.heard`; a proof in this run replaces the state of the last run."""
        super().heard(post, event)
        if post is self.serving and event.state == "serving":
            self._last_run.followed(self, post)

    def tell(self, kind: RosterChange, message: str) -> None:
        """One line in the log."""
        level = logging.WARNING if kind in ("alarm", "tightened") else logging.INFO
        _log.log(level, "change of version or setting", extra={"change": kind, "reason": message})

    def name_of(self, post: Post[Answering]) -> str:
        """The name of the version."""
        return post.version.name

    def begin_opening(self, post: Post[Answering], level: int, kind: RosterChange, counted: str) -> None:
        """Open a setting in the loader's thread."""
        self._settings.begin(self, post, level, kind, counted)

    def figures(self, post: Post[Answering]) -> Composition | None:
        """The composition of its deployed setting."""
        return post.deployed.composition

    def on_serving(self, post: Post[Answering]) -> None:
        """Report that another version or setting answers."""
        self._on_change(post)

    def on_promoted(self, post: Post[Answering]) -> None:
        """Report that the version takes over."""
        self._on_takeover(post)

    def on_fell_back(self, post: Post[Answering]) -> None:
        """Report that the version answers again."""
        self._on_takeover(post)

    def on_given_up(self, post: Post[Answering]) -> None:
        """Do nothing: the version stays loaded and can be activated again."""
