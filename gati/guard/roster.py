"""Which version answers, by which of its settings, and which is on trial to take its place.

`gati stream` and `gati serve` differ in what a version is, how a setting of it is opened, and who is told:
that is what the subclasses of `Roster` add. What may answer is decided here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Literal

from gati.composition.composition import Composition
from gati.guard.posts import Post, Version, cost_ms
from gati.guard.proof import Proof
from gati.guard.watch import Event

__all__ = ["Roster", "RosterChange"]

RosterChange = Literal["alarm", "tightened", "loosened", "returned", "kept"]


class Roster(ABC, Generic[Version]):
    """Nothing answers early that is not proven.

    Versions that a certificate covers serve at once. Others, retrained or brought back, are on trial: looked
    up in the shadow of the one that serves, whose caches go on answering, until so many of their settings are
    proven that they are faster. They go on to be proven while they serve. Not thread-safe.
    """

    def __init__(self, serving: Post[Version]) -> None:
        self.serving = serving
        self.trial: Post[Version] | None = None
        self.alarmed = False  # until caches serve again
        self._costs = self.figures(serving)

    @property
    def may_hit(self) -> bool:
        """Whether early answers of the network may be given."""
        return self.serving.may_hit

    @property
    def proof(self) -> Proof | None:
        """The proof under way: of the version on trial, else of the one that serves."""
        return self._proving.watch.proof

    @property
    def how_far(self) -> str:
        """How far that is; empty where there is none."""
        proof = self.proof
        if proof is None:
            return ""
        said = f"{proof.how_far}, {proof.losses} of them disagree"
        watched = self._proving.watch
        if watched.settings == 1:
            return said
        return f"{said}, {watched.level} of {watched.settings} settings proven"

    @property
    def _proving(self) -> Post[Version]:
        return self.trial or self.serving

    # What the two services do in their own ways -----------------------------------------------------------

    @abstractmethod
    def tell(self, kind: RosterChange, message: str) -> None:
        """A change is made."""

    @abstractmethod
    def begin_opening(self, post: Post[Version], level: int, kind: RosterChange, counted: str) -> None:
        """Open a setting that is proven, then call `opened`; `kind` and `counted` are for that."""

    @abstractmethod
    def figures(self, post: Post[Version]) -> Composition | None:
        """What the lookups of the version cost that the post deploys; None for one without caches."""

    @abstractmethod
    def on_serving(self, post: Post[Version]) -> None:
        """Another setting of this post, the one that serves, answers from now on."""

    @abstractmethod
    def on_promoted(self, post: Post[Version]) -> None:
        """A version that was on trial serves from the next request on: it is proven."""

    @abstractmethod
    def on_given_up(self, post: Post[Version]) -> None:
        """A trial came to nothing."""

    # ------------------------------------------------------------------------------------------------------

    def serve(self, post: Post[Version]) -> None:
        """Let this version serve from now on, and nothing be on trial."""
        self.serving, self.trial, self.alarmed = post, None, False
        self._serves(post)

    def bring_back(self, post: Post[Version]) -> None:
        """Take back what audits proved of a version that does not serve: they were of other requests.

        A certificate stands; so does the proof of a version on trial.
        """
        under_way = [each.watch for each in (self.serving, self.trial) if each is not None]
        if post.watch not in under_way:
            post.watch.bring_back()

    def give_up(self) -> None:
        """End a trial that came to nothing, and let the version that serves begin its proof anew."""
        if self.serving.hopeless:
            self.serving.watch.prove_anew()
        self.settle()
        trial = self.trial
        if trial is None:
            return
        proof = trial.watch.proof
        slower = trial.may_hit and not trial.faster and (proof is None or proof.hopeless)
        if trial.hopeless or slower:
            how_far = self.how_far or "all settings proven"
            self.trial = None
            self.on_given_up(trial)
            why = "is proven, but not faster" if slower else "was not proven"
            self.tell("kept", f"version {self.name_of(trial)} {why}: {how_far}")

    def name_of(self, post: Post[Version]) -> str:
        """What its version is called."""
        return str(post.version)

    def compare(self, post: Post[Version], exits: Sequence[str], serving_exit: str | None) -> None:
        """Take in where the settings of a version on trial would leave, and where a request left.

        `serving_exit` None: it was not looked up.
        """
        costs = self._costs
        if post is self.trial and post.settings and costs is not None:
            own_ms = costs.expected.base_latency_ms if serving_exit is None else cost_ms(costs, serving_exit)
            post.compare(exits, own_ms)

    def heard(self, post: Post[Version], event: Event) -> None:
        """The watch of a version says what may answer from now on."""
        counted = f"{event.losses} of {event.audits} audits disagree"
        if post is not self.serving:
            self.settle()
        elif event.state == "stopped":
            self.alarmed = True
            self.tell("alarm", f"caches stop: {counted}")
        elif event.tightened:
            self._serves(post)
            self.tell("tightened", f"a stricter setting answers: {counted}")
            self.settle()
        else:
            first, self.alarmed = post.watch.settings == 1 or self.alarmed, False
            if post.watch.settings == 1:
                self._serves(post)
                self.tell("returned", f"caches serve: {counted}")
            else:
                self.settle("returned" if first else "loosened", counted)

    def settle(self, kind: RosterChange = "loosened", counted: str = "") -> None:
        """Open settings that are proven, and let the version on trial serve where it is faster."""
        for post in (self.serving, self.trial):
            if post is None or post.opening or post.level == post.watch.level:
                continue
            post.opening = True
            self.begin_opening(post, post.watch.level, kind, counted)
        trial = self.trial
        if trial is not None and trial.may_hit and (not self.may_hit or self._is_faster(trial)):
            self.serve(trial)
            self.on_promoted(trial)

    def opened(
        self, post: Post[Version], level: int, version: Version, kind: RosterChange, counted: str
    ) -> None:
        """A setting is open now."""
        before = post.level
        post.open[level] = version
        post.opening = False
        if post is self.serving and post.level > before:
            self._serves(post)
            what = f"setting {post.level} of {post.watch.settings} answers"
            self.tell(kind, f"{what}: {counted}" if counted else what)
        self.settle()

    def not_opened(self, post: Post[Version]) -> None:
        """A setting cannot be opened. It is not tried again: what is open goes on."""
        if post is self.trial:
            self.trial = None
            self.on_given_up(post)

    def _is_faster(self, trial: Post[Version]) -> bool:
        """Whether it is known to be; where a trial goes on after a restart, nothing is compared yet."""
        comparable = bool(trial.settings) and self._costs is not None
        return trial.faster and (trial.compared > 0 or not comparable)

    def _serves(self, post: Post[Version]) -> None:
        """Count anew for what answers from now on."""
        self._costs = self.figures(post)
        self.on_serving(post)
