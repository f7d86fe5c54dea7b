"""Which version answers, and which is on trial to take its place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gati.adaptation.deployments import Deployed, Deployments
from gati.adaptation.renewal import Promise, RenewalOutcome
from gati.adaptation.settings import ChangeKind
from gati.errors import GatiError
from gati.guard import watch
from gati.guard.proof import Proof
from gati.guard.standing import Standing, identity_of, is_proven
from gati.guard.watch import Watch

__all__ = ["Post", "Succession", "Tell"]

Tell = Callable[[ChangeKind, str, dict[str, Any]], None]


@dataclass(frozen=True, eq=False)
class Post:
    """A version with the watch that is kept of it."""

    deployed: Deployed
    watch: Watch

    @property
    def hopeless(self) -> bool:
        """Whether its proof comes to nothing."""
        proof = self.watch.proof
        return proof is not None and proof.hopeless


class Succession:
    """Nothing answers early that is not proven.

    Versions that a certificate covers serve at once. Others, retrained or brought back, are on trial: looked
    up in the shadow of the one that serves, whose caches go on answering, until their watch says that they
    are proven. `lock` is the caller's. `tell` hears of changes, `on_serving` of the version that serves from
    then on, or again.
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
    ) -> None:
        self._deployments = deployments
        self._promise = promise
        self._lock = lock
        self._tell, self._on_serving = tell, on_serving
        self._found: RenewalOutcome | None = None  # what is on trial
        self.standing = standing
        self.serving = self._post(deployments.open(0))
        self.trial: Post | None = None
        self.alarmed = False  # until caches serve again
        self.unproven: set[int] = set()  # versions that were given up

    @property
    def may_hit(self) -> bool:
        """Whether early answers of the network may be given."""
        return self.serving.watch.may_hit

    @property
    def proof(self) -> Proof | None:
        """The proof under way: of the version on trial, else of the one that does not answer."""
        return (self.trial or self.serving).watch.proof

    @property
    def how_far(self) -> str:
        """How far that is; empty where there is none."""
        proof = self.proof
        if proof is None:
            return ""
        counted = f"{proof.audits} of about {proof.required} audits"
        return f"{proof.agreement:g}: {counted}, {proof.losses} of them disagree"

    def begin(self, samples: int) -> bool:
        """Go on with the version that is active in the repository; whether there is one.

        Where it is not proven, the library's own caches answer, if they may, until it is. A version that was
        published and not proven yet when the process ended is on trial again.
        """
        active, why_not = self._deployments.active()
        if active.number:
            post = self._post(active)
            if post.watch.may_hit:
                self.serving = post
            else:
                self.trial = post
        newest = self._deployments.newest()
        if self.trial is None and newest is not None and newest.number > active.number:
            self.trial = self._post(newest)
        self._on_serving(self.serving.deployed)
        if why_not:
            self._tell("failed", f"the active version cannot serve: {why_not}", {})
        elif active.number:
            self._tell("resumed", f"version {active.number}, {samples} samples", {})
        if self.proof is not None:
            self._tell("probation", f"caches are not proven yet: {self.how_far}", {})
        return active.number > 0

    def take(self, outcome: RenewalOutcome) -> None:
        """Let what was found prove itself, also what served before.

        What it was chosen by are requests that came among those it was trained on, and pictures of a stream
        are alike: that proves nothing.
        """
        if outcome.kind == "kept":
            self._tell("kept", outcome.message, outcome.details)
            return
        with self._lock:
            self._found, self.trial = outcome, self._post(outcome.deployed)
            if outcome.kind == "reused":
                self.trial.watch.prove_anew()
            what = f"version {outcome.deployed.number} has to prove itself: {self.how_far}"
            self._tell("probation", what, outcome.details)

    def give_up(self) -> None:
        """End a trial that came to nothing, and let the version that serves begin its proof anew."""
        if self.serving.hopeless:
            self.serving.watch.prove_anew()
        trial = self.trial
        if trial is not None and trial.hopeless:
            how_far = self.how_far
            self._found = self.trial = None
            self.unproven.add(trial.deployed.number)
            self._tell("kept", f"version {trial.deployed.number} was not proven: {how_far}", {})

    def _post(self, deployed: Deployed) -> Post:
        promise, chosen = self._promise, deployed.served.composition

        def heard(event: watch.Event) -> None:
            self._heard(deployed, event)

        kept = self.standing.watch(
            identity_of(chosen),
            promise.accuracy,
            proven=is_proven(chosen, promise.accuracy, promise.confidence),
            on_event=heard,
        )
        return Post(deployed, kept)

    def _heard(self, deployed: Deployed, event: watch.Event) -> None:
        counted = f"{event.losses} of {event.audits} audits disagree"
        trial = self.trial
        if trial is not None and trial.deployed.number == deployed.number:
            self._promote(trial)
        elif event.state == "stopped":
            self.alarmed = True
            self._tell("alarm", f"caches stop: {counted}", {})
        else:
            self.alarmed = False
            self._on_serving(deployed)
            self._tell("returned", f"caches serve: {counted}", {})

    def _promote(self, post: Post) -> None:
        """Let a version serve from the next request on: it is proven."""
        found, self._found = self._found, None
        self.serving, self.trial, self.alarmed = post, None, False
        self._on_serving(post.deployed)
        if found is None:  # of a run before
            self._tell("activated", f"version {post.deployed.number} is proven", {})
        else:
            self._tell(found.kind, found.message, found.details)
        try:
            self._deployments.activate(post.deployed)
        except GatiError as error:
            self._tell("failed", f"a restart may not find version {post.deployed.number}: {error}", {})
