"""Which version of a stream answers, by which of its settings, and which is on trial to take its place."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from gati.adaptation.deployments import Deployed, Deployments
from gati.adaptation.renewal import Promise, RenewalOutcome
from gati.adaptation.settings import ChangeKind, OnTrial
from gati.composition.composition import Composition
from gati.errors import GatiError, first_line
from gati.guard.posts import Post
from gati.guard.roster import Roster, RosterChange
from gati.guard.standing import Standing, created_s, identity_of, is_proven, is_reference, of_rest
from gati.guard.watch import Event, Watch

Tell = Callable[[ChangeKind, str, dict[str, Any]], None]
Work = Callable[[Callable[[], None]], bool]

_PART = "in use"


def _at_once(job: Callable[[], None]) -> bool:
    job()
    return True


class Succession(Roster[Deployed]):
    """The versions of a stream: those of `deployments`, all with one promise.

    `lock` is the caller's. `tell` is called with changes, `on_serving` with the version that serves from then
    on. `leave` opens settings, possibly in the background, and returns whether there is room; `figures`
    returns the composition with the lookups' costs.
    """

    def __init__(
        self,
        deployments: Deployments,
        promise: Promise,
        standing: Standing,
        lock: threading.RLock,
        *,
        tell: Tell,
        on_serving: Callable[[Deployed], None],
        leave: Work = _at_once,
        figures: Callable[[Deployed], Composition] = lambda deployed: deployed.served.composition,
    ) -> None:
        self._deployments = deployments
        self._promise = promise
        self._lock = lock
        self._tell, self._on_serving = tell, on_serving
        self._leave, self._figures = leave, figures
        self._found: RenewalOutcome | None = None  # what is on trial
        self.standing = standing
        self.unproven: set[int] = set()  # versions that were given up
        left = standing.kept(_PART, math.inf)
        self._left = left if isinstance(left, list) else None  # the versions in use when the last run ended
        standing.keep(_PART, lambda: self._left)
        super().__init__(self._post(deployments.open(0)))

    @property
    def on_trial(self) -> OnTrial | None:
        """The version that does not answer until it is proven; None if there is none."""
        proof = self.proof
        if proof is None or (self.trial is None and self.may_hit):
            return None
        number = self._proving.version.number
        return OnTrial(number, proof.audits, proof.losses, proof.required, waits=self.may_hit)

    def begin(self, samples: int) -> bool:
        """Continue with the version that is active in the repository; returns whether there is one.

        Until it is proven, the library's own caches answer, if they may. A version that was published but not
        proven when the process ended is on trial again. One that was not in use by then, as it was given up,
        or others activated it since or rolled back to it, was proven on earlier requests, and is proven anew.
        """
        active, why_not = self._deployments.active()
        post = self._resumed(active)
        self.standing.keep(_PART, lambda: [_identity(each) for each in (self.serving, self.trial) if each])
        waits = post is not self.serving and not post.may_hit
        if (waits or why_not) and _identity(self.serving) not in (self._left or ()):
            # its own proofs are of requests before that version served
            self.serving.bring_back()
            self.standing.save()
        self.serve(self.serving if waits else post, trial=post if waits else None)
        newest, why_not_newest = self._deployments.newest()
        if self.trial is None and newest is not None and newest.number > active.number:
            self.trial = self._resumed(newest)
        for each in filter(None, (why_not, why_not_newest)):
            self._tell("failed", each, {})
        if active.number:
            self._tell("resumed", f"version {active.number}, {samples} samples", {})
        if self.standing.elsewhere:
            self._tell("probation", "earlier proofs are not known to be of this source and do not count", {})
        if self.trial is not None or not self.may_hit:
            self._tell("probation", f"caches are not proven yet: {self.how_far}", {})
        return active.number > 0

    def take(self, outcome: RenewalOutcome) -> None:
        """Put the new version on trial, even if it has served before.

        It was chosen on requests close to its training data, as pictures of a stream are similar: that
        proves nothing. While certified caches answer instead of stopped ones, an alarm calls for one search.
        """
        number = outcome.deployed.number
        with self._lock:
            self.alarmed &= not self.may_hit
            if outcome.kind == "kept":
                self._tell("kept", outcome.message, outcome.details)
                return
            if number == self.serving.deployed.number:  # the guard let it answer again meanwhile
                self._tell("kept", f"version {number} already answers", outcome.details)
                return
            self._found, self.trial = outcome, self._post(outcome.deployed) if number else self.first
            self.trial.compare_anew()
            if outcome.kind == "reused":
                self.trial.prove_anew()
            what = f"version {number} has to prove itself: {self.how_far or 'it is certified'}"
            self._tell("probation", what, outcome.details)

    def save(self) -> None:
        """Write down what is proven now, also while other threads go on proving."""
        with self._lock:
            snapshot = self.standing.snapshot()
        self.standing.write(snapshot)

    # As a roster ------------------------------------------------------------------------------------------

    def tell(self, kind: RosterChange, message: str) -> None:
        """Report a change."""
        self._tell(kind, message, {})

    def name_of(self, post: Post[Deployed]) -> str:
        """The number of its version."""
        return str(post.version.number)

    def begin_opening(self, post: Post[Deployed], level: int, kind: RosterChange, counted: str) -> None:
        """Open a setting, in the background if there is one.

        If there is no room for it, the next request tries again.
        """
        if not self._leave(partial(self._open, post, level, kind, counted)):
            post.opening = 0

    def figures(self, post: Post[Deployed]) -> Composition:
        """The composition with the lookups' costs, estimated if they were not measured."""
        return self._figures(post.deployed)

    def on_serving(self, post: Post[Deployed]) -> None:
        """Report what serves."""
        self._on_serving(post.deployed)

    def on_promoted(self, post: Post[Deployed]) -> None:
        """Activate the version in the repository, for restarts."""
        found, self._found = self._found, None
        number = post.version.number
        self._retire()
        if found is None:  # found by an earlier run
            self._tell("activated", f"version {number} is proven", {})
        else:
            self._tell(found.kind, found.message, found.details)
        try:
            self._deployments.activate(post.version)
        except GatiError as error:
            self._tell("failed", f"a restart may not find version {number}: {error}", {})

    def on_fell_back(self, post: Post[Deployed]) -> None:
        """Activate nothing: a restart tries the active version again; this one answers until it is proven."""
        self._retire()

    def on_given_up(self, post: Post[Deployed]) -> None:
        """Remember not to try the version again."""
        self._found = None
        self._retire()
        if post.version.number:  # the library's own caches may be tried again
            self.unproven.add(post.version.number)

    def _retire(self) -> None:
        """Watch only versions that may answer: of the others, the file keeps what is known."""
        self.standing.watch_only({_identity(post) for post in self.in_use})

    def _heard(self, identity: str, event: Event, *, rest: bool) -> None:
        # by identity: the watches stay, and must not keep the engines of versions that left
        for post in self.in_use:
            if _identity(post) == identity and post.after_memory == rest:
                self.heard(post, event)
                return

    def _post(self, deployed: Deployed) -> Post[Deployed]:
        promise, chosen, settings = self._promise, deployed.served.composition, len(deployed.settings)
        identity = identity_of(chosen)

        def watch(*, proven: bool, rest: bool) -> Watch:
            return self.standing.watch(
                of_rest(identity) if rest else identity,
                promise.accuracy,
                proven=proven,
                settings=max(settings, 1),
                created_s=created_s(chosen),
                on_event=partial(self._heard, identity, rest=rest),
            )

        kept = watch(proven=is_proven(chosen, promise.accuracy, promise.confidence), rest=False)
        post = Post(
            deployed,
            kept,
            [setting.composition for setting in deployed.settings],
            nested=deployed.nested,
            rest=lambda: watch(proven=is_reference(chosen), rest=True),
            is_after_memory=lambda: self.is_after_memory(post),
        )
        if kept.level and not post.may_hit:  # proven in an earlier run
            with suppress(Exception):  # the base model answers; the next attempt to open it reports why
                post.open[kept.level] = self._deployments.at(deployed.number, kept.level)
        return post

    def _resumed(self, deployed: Deployed) -> Post[Deployed]:
        """The post of a version; what audits proved of it does not count if it was not in use last."""
        post = self._post(deployed) if deployed.number else self.serving
        if self._left is not None and _identity(post) not in self._left:
            post.bring_back()
        return post

    def _open(self, post: Post[Deployed], level: int, kind: RosterChange, counted: str) -> None:
        try:
            version = self._deployments.at(post.version.number, level)
        except Exception as error:  # of any type, like the failures of engines
            with self._lock:
                why = first_line(error)
                self._tell("failed", f"version {post.version.number} cannot be opened: {why}", {})
                self.not_opened(post)
            return
        with self._lock:
            self.opened(post, level, version, kind, counted)


def _identity(post: Post[Deployed]) -> str:
    return identity_of(post.version.served.composition)
