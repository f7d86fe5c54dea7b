"""Which version answers, by which of its settings, and which is on trial to take its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from gati.adaptation.deployments import Deployed, Deployments
from gati.adaptation.renewal import Promise, RenewalOutcome
from gati.adaptation.settings import ChangeKind
from gati.composition.composition import Composition
from gati.errors import GatiError
from gati.guard import watch
from gati.guard.proof import Proof
from gati.guard.standing import Standing, identity_of, is_proven
from gati.guard.watch import Watch

__all__ = ["Post", "Succession", "Tell"]

Tell = Callable[[ChangeKind, str, dict[str, Any]], None]
Work = Callable[[Callable[[], None]], Any]

_FASTER = 0.97  # of the time that those who serve take: what a version on trial must stay below


class Post:
    """A version with the watch that is kept of it, and its settings that are `open`, by their level."""

    def __init__(self, version: Deployed, watch: Watch) -> None:
        self.version = version
        self.watch = watch
        self.open: dict[int, Deployed] = {} if version.settings else {1: version}
        self.opening = False
        self.compared = 0  # requests of which it is known what each setting, and who serves, would take
        self._settings_ms = [0.0] * len(version.settings)
        self._serving_ms = 0.0

    @property
    def level(self) -> int:
        """The loosest setting that is proven and open; 0 where there is none."""
        return max((level for level in self.open if level <= self.watch.level), default=0)

    @property
    def may_hit(self) -> bool:
        """Whether its caches may answer."""
        return self.level > 0

    @property
    def deployed(self) -> Deployed:
        """The version at the setting that may answer; as it was published where none may."""
        return self.open.get(self.level, self.version)

    @property
    def hopeless(self) -> bool:
        """Whether its proof comes to nothing, and nothing of it is proven."""
        proof = self.watch.proof
        return self.watch.level == 0 and proof is not None and proof.hopeless

    def compare(self, exits: Sequence[str], serving_ms: float) -> None:
        """Take in where each setting would leave, and how long the version that serves takes."""
        self.compared += 1
        self._serving_ms += serving_ms
        for at, (setting, exit) in enumerate(zip(self.version.settings, exits, strict=True)):
            self._settings_ms[at] += cost_ms(setting.composition, exit)

    @property
    def faster(self) -> bool:
        """Whether the setting that is proven takes less time than what serves, on the same requests."""
        if not self.compared:
            return True
        return self._settings_ms[self.level - 1] < _FASTER * self._serving_ms


def cost_ms(composition: Composition, exit: str) -> float:
    """How long a request takes that leaves there, by the composition's own figures."""
    lookups_ms = 0.0
    for leaving in composition.exits:
        if leaving.block == exit:
            return leaving.exit_ms
        lookups_ms += leaving.lookup_ms
    return composition.expected.base_latency_ms + lookups_ms


def _at_once(job: Callable[[], None]) -> None:
    job()


class Succession:
    """Nothing answers early that is not proven.

    Versions that a certificate covers serve at once. Others, retrained or brought back, are on trial: looked
    up in the shadow of the one that serves, whose caches go on answering, until so many of their settings are
    proven that they are faster. They go on to be proven while they serve. `lock` is the caller's. `tell`
    hears of changes, `on_serving` of what serves from then on, or again. `leave` is handed the opening of
    settings, for a thread that nobody waits for; `figures` says what the lookups of a version cost.
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
        self.serving = self._post(deployments.open(0))
        self._costs = figures(self.serving.deployed)
        self.trial: Post | None = None
        self.alarmed = False  # until caches serve again
        self.unproven: set[int] = set()  # versions that were given up

    @property
    def may_hit(self) -> bool:
        """Whether early answers of the network may be given."""
        return self.serving.may_hit

    @property
    def proof(self) -> Proof | None:
        """The proof under way: of the version on trial, else of the one that serves."""
        return self._proving.watch.proof

    @property
    def _proving(self) -> Post:
        return self.trial or self.serving

    @property
    def how_far(self) -> str:
        """How far that is; empty where there is none."""
        proof = self.proof
        if proof is None:
            return ""
        counted = f"{proof.audits} of about {proof.required} audits"
        said = f"{proof.agreement:g}: {counted}, {proof.losses} of them disagree"
        watched = self._proving.watch
        if watched.settings == 1:
            return said
        return f"{said}, {watched.level} of {watched.settings} settings proven"

    def begin(self, samples: int) -> bool:
        """Go on with the version that is active in the repository; whether there is one.

        Where it is not proven, the library's own caches answer, if they may, until it is. A version that was
        published and not proven yet when the process ended is on trial again.
        """
        active, why_not = self._deployments.active()
        if active.number:
            post = self._post(active)
            if post.may_hit:
                self.serving = post
                self._costs = self._figures(post.deployed)
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
        if self.trial is not None or not self.may_hit:
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
        self._settle()
        trial = self.trial
        if trial is None:
            return
        proof = trial.watch.proof
        slower = trial.may_hit and not trial.faster and (proof is None or proof.hopeless)
        if trial.hopeless or slower:
            how_far = self.how_far or "all settings proven"
            self._found = self.trial = None
            self.unproven.add(trial.version.number)
            why = "is proven, but not faster" if slower else "was not proven"
            self._tell("kept", f"version {trial.version.number} {why}: {how_far}", {})

    def compare(self, post: Post, exits: Sequence[str], serving_exit: str | None) -> None:
        """Take in where the settings of a version on trial would leave, and where a request left.

        `serving_exit` None: it was not looked up.
        """
        if post is self.trial and post.version.settings:
            costs = self._costs
            own_ms = costs.expected.base_latency_ms if serving_exit is None else cost_ms(costs, serving_exit)
            post.compare(exits, own_ms)

    def _post(self, deployed: Deployed) -> Post:
        promise, chosen = self._promise, deployed.served.composition

        def heard(event: watch.Event) -> None:
            self._heard(post, event)

        kept = self.standing.watch(
            identity_of(chosen),
            promise.accuracy,
            proven=is_proven(chosen, promise.accuracy, promise.confidence),
            settings=max(len(deployed.settings), 1),
            on_event=heard,
        )
        post = Post(deployed, kept)
        if kept.level and not post.may_hit:  # proven in a run before
            with suppress(GatiError):  # the base model answers, and why is told when it is opened again
                post.open[kept.level] = self._deployments.at(deployed.number, kept.level)
        return post

    def _heard(self, post: Post, event: watch.Event) -> None:
        counted = f"{event.losses} of {event.audits} audits disagree"
        if post is not self.serving:
            self._settle()
        elif event.state == "stopped":
            self.alarmed = True
            self._tell("alarm", f"caches stop: {counted}", {})
        elif event.tightened:
            self._serves(post)
            self._tell("tightened", f"a stricter setting answers: {counted}", {})
            self._settle()
        else:
            first, self.alarmed = post.watch.settings == 1 or self.alarmed, False
            if post.watch.settings == 1:
                self._serves(post)
                self._tell("returned", f"caches serve: {counted}", {})
            else:
                self._settle("returned" if first else "loosened", counted)

    def _settle(self, kind: ChangeKind = "loosened", counted: str = "") -> None:
        """Open settings that are proven, and let the version on trial serve where it is faster."""
        for post in (self.serving, self.trial):
            if post is None or post.opening or post.level == post.watch.level:
                continue
            post.opening = True
            self._leave(partial(self._open, post, post.watch.level, kind, counted))
        trial = self.trial
        if trial is not None and trial.may_hit and (not self.may_hit or trial.faster):
            self._promote(trial)

    def _open(self, post: Post, level: int, kind: ChangeKind, counted: str) -> None:
        """Open a setting, in the background where that takes its time."""
        try:
            opened = self._deployments.at(post.version.number, level)
        except GatiError as error:  # it is not tried again: what is open goes on
            with self._lock:
                self._tell("failed", f"version {post.version.number} cannot be opened: {error}", {})
                if post is self.trial:
                    self.trial = self._found = None
            return
        with self._lock:
            before = post.level
            post.open[level] = opened
            post.opening = False
            if post is self.serving and post.level > before:
                self._serves(post)
                what = f"setting {post.level} of {post.watch.settings} answers"
                self._tell(kind, f"{what}: {counted}" if counted else what, {})
            self._settle()

    def _serves(self, post: Post) -> None:
        """Count anew for what answers from now on."""
        self._costs = self._figures(post.deployed)
        self._on_serving(post.deployed)

    def _promote(self, post: Post) -> None:
        """Let a version serve from the next request on: it is proven."""
        found, self._found = self._found, None
        self.serving, self.trial, self.alarmed = post, None, False
        self._serves(post)
        number = post.version.number
        if found is None:  # of a run before
            self._tell("activated", f"version {number} is proven", {})
        else:
            self._tell(found.kind, found.message, found.details)
        try:
            self._deployments.activate(post.version)
        except GatiError as error:
            self._tell("failed", f"a restart may not find version {number}: {error}", {})
