"""The watches of a served version: of all requests, and of those that memory leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gati.adaptation.references import is_exact
from gati.composition.composition import Composition
from gati.composition.plans import DEFAULT_CONFIDENCE
from gati.guard.posts import Post
from gati.guard.standing import created_s, identity_of, of_rest
from gati.guard.watch import Event, Watch
from services.inference.following import Answering, Shared
from services.inference.loaded import certifies
from services.inference.opening import Opened

_log = logging.getLogger("gati.inference")

Heard = Callable[[Composition, Event, bool], None]
IsAfterMemory = Callable[[Post[Answering]], bool]


class Watching:
    """Watches versions for their promises. Not thread-safe: call from the event loop.

    `heard` is called with a change of caches: a composition that has them and their promise, the event, and
    whether it is about the requests that memory leaves. `is_after_memory` says which of both decides.
    """

    def __init__(self, shared: Shared, heard: Heard, is_after_memory: IsAfterMemory) -> None:
        self._shared, self._heard, self._is_after_memory = shared, heard, is_after_memory

    @property
    def remembers(self) -> bool:
        """Whether requests may be answered from memory."""
        return self._shared.settings.memory and self._shared.guarded

    def post(self, answering: Answering, opened: Opened) -> Post[Answering] | None:
        """A version with its watches; None if the user's network gives all answers."""
        chosen = opened.composition
        if chosen is None or not (chosen.exits or not is_exact(opened.engine)):
            return None
        post = Post(
            answering,
            self._watch(chosen, opened, proven=certifies(chosen, retrained=opened.retrained)),
            [setting.composition for setting in opened.settings],
            nested=opened.nested,
            rest=(lambda: self._watch(chosen, opened, proven=False, rest=True)) if self.remembers else None,
            is_after_memory=lambda: self._is_after_memory(post),
        )
        return post

    def _watch(self, chosen: Composition, opened: Opened, *, proven: bool, rest: bool = False) -> Watch:
        identity = identity_of(chosen)
        return self._shared.standing.of(
            of_rest(identity) if rest else identity,
            chosen.accuracy_target,
            proven=proven,
            settings=max(1, len(opened.settings)),
            delta=(1.0 - (chosen.confidence or DEFAULT_CONFIDENCE)) / self._shared.settings.replicas,
            created_s=created_s(chosen),
            on_event=lambda event: self._heard(chosen, event, rest),
        )


def log_change(event: Event, versions: list[str], *, rest: bool) -> None:
    """One line in the log about an event of a watch."""
    stopped = event.state == "stopped"
    what = "caches stopped by the guard" if stopped else "caches proven, they answer from now on"
    if event.tightened and not stopped:
        what = "a stricter setting of the caches answers"
    _log.log(
        logging.WARNING if event.tightened or stopped else logging.INFO,
        what,
        extra={
            "versions": versions,
            "requests": "that memory leaves" if rest else "all",
            "audits": event.audits,
            "disagreements": event.losses,
        },
    )
