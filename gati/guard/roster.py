"""Which version answers, by which of its settings, and which is on trial to take its place.

`Roster` decides what may answer. Subclasses add what differs between `gati stream` and `gati serve`: the type
of a version, how its settings are opened, and how changes are reported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Literal

from gati.composition.composition import Composition
from gati.guard.posts import Post, Version, cost_ms
from gati.guard.proof import Proof
from gati.guard.standing import is_reference
from gati.guard.watch import Event, Watch

RosterChange = Literal["alarm", "tightened", "loosened", "returned", "kept", "probation"]

_WORTH = 0.1  # share of requests that memory answers, for which caches prove themselves on the rest
_MOST = 0.5  # memory that answers more than this goes on even if caches do not prove themselves
_TRIED_AGAIN_AFTER = 1000  # requests, for memory and for settings that cannot be opened; doubles each time


class Roster(ABC, Generic[Version]):
    """Allows early answers only from proven settings. Not thread-safe.

    Versions with a certificate serve immediately. Others, retrained or brought back, are on trial: they are
    looked up in the shadow of the version that serves until enough of their settings are proven to be faster.
    Their other settings are proven while they serve. If the guard stops one of these, the library's
    composition answers instead, as far as it may, if the roster began with it (`first`).

    Once memory answers, caches are judged by the requests that it leaves (`after_memory`): until they are
    proven on these, the reference answers them. If they cannot be proven, and memory answers few requests,
    caches that are proven on all requests answer again, and memory waits.
    """

    after_memory = False

    def __init__(self, serving: Post[Version]) -> None:
        self.serving = self.first = serving
        self.trial: Post[Version] | None = None
        self.alarmed = False  # until caches are proven again, or better ones were looked for
        self._waiting, self._next_wait = 0, _TRIED_AGAIN_AFTER
        self._memory_level = 1  # by which setting memory answers next to caches
        self._costs = self.figures(serving)

    @property
    def may_hit(self) -> bool:
        """Whether early answers of the network may be given."""
        return self.serving.may_hit

    @property
    def proof(self) -> Proof | None:
        """The current proof: of the version on trial, otherwise of the serving one."""
        return self._proving.watch.proof

    @property
    def how_far(self) -> str:
        """The progress of that proof; empty without one."""
        proof = self.proof
        if proof is None:
            return ""
        said = f"{proof.how_far}, {proof.losses} of them disagree"
        if proof.wrong_copies:
            said += f", as do {proof.wrong_copies} of {proof.copies} copies of the inputs before"
        watched = self._proving.watch
        if watched.settings == 1:
            return said
        return f"{said}, {watched.level} of {watched.settings} settings proven"

    @property
    def in_use(self) -> list[Post[Version]]:
        """The versions that answer, or may do so later; one may be there twice."""
        return [post for post in (self.serving, self.trial, self.first) if post is not None]

    @property
    def _proving(self) -> Post[Version]:
        return self.trial or self.serving

    # What subclasses add ----------------------------------------------------------------------------------

    @abstractmethod
    def tell(self, kind: RosterChange, message: str) -> None:
        """Report a change."""

    @abstractmethod
    def begin_opening(self, post: Post[Version], level: int, kind: RosterChange, counted: str) -> None:
        """Open a proven setting, then call `opened` with `kind` and `counted`."""

    @abstractmethod
    def figures(self, post: Post[Version]) -> Composition | None:
        """The composition with the costs of what the post deploys; None without caches."""

    @abstractmethod
    def on_serving(self, post: Post[Version]) -> None:
        """Another setting of the serving post answers from now on."""

    @abstractmethod
    def on_promoted(self, post: Post[Version]) -> None:
        """The version on trial is proven and serves from the next request on."""

    @abstractmethod
    def on_fell_back(self, post: Post[Version]) -> None:
        """The first version serves from the next request on, as the guard has stopped another."""

    @abstractmethod
    def on_given_up(self, post: Post[Version]) -> None:
        """A trial failed."""

    # ------------------------------------------------------------------------------------------------------

    def serve(self, post: Post[Version], trial: Post[Version] | None = None) -> None:
        """Let this version serve from now on, with `trial` on trial."""
        self.serving, self.trial, self.alarmed = post, trial, False
        self._say_what_is_left()
        self._serves(post)

    def is_after_memory(self, post: Post[Version]) -> bool:
        """Whether a version is judged by the requests that memory leaves; other versions do not follow it."""
        return self.after_memory and any(post is each for each in self.in_use)

    def follow_memory(self, share: float | None, level: int = 1) -> None:
        """Call after each request, with the share that memory answers next to caches; None if it may not.

        `level` is the setting by which it does: caches are proven on what it leaves by this one, or by looser
        ones, which leave fewer and harder requests.
        """
        self._waiting = max(0, self._waiting - 1)
        if share is not None:
            self._memory_level = level
        if not self.after_memory:
            if share is not None and share >= _WORTH and not self._waiting:
                self._judge(after_memory=True)
        elif share is None:
            self._judge(after_memory=False)
        elif self._say_what_is_left():
            self._judge(after_memory=True)
        elif self.serving.hopeless and self.serving.of_all.level and share < _MOST:
            self._waiting, self._next_wait = self._next_wait, 2 * self._next_wait
            self.serving.watch.prove_anew()
            self._judge(after_memory=False)

    def _say_what_is_left(self) -> bool:
        """Tell the versions which requests memory leaves; returns whether proofs were withdrawn."""
        return self.after_memory and any([post.left_by(self._memory_level) for post in self.in_use])

    def _judge(self, *, after_memory: bool) -> None:
        """From now on, versions are judged by the requests that memory leaves, or by all."""
        self.after_memory = after_memory
        self._say_what_is_left()
        first, before = self.first, self.serving
        if not before.may_hit and self.trial is None and first is not before and first.may_hit:
            self.serve(first, trial=before)
            self.on_fell_back(first)
        else:
            self._serves(before)
        requests = "the requests that memory leaves" if after_memory else "all requests, without memory"
        without_caches = self._costs is not None and is_reference(self._costs)
        if self.serving.may_hit and not without_caches:
            self.tell("returned", f"caches answer {requests}: they are proven on them")
        elif not without_caches or self.trial is not None:
            self.tell("probation", f"caches must prove themselves on {requests}: {self.how_far}")
        self.settle()

    def bring_back(self, post: Post[Version]) -> None:
        """Withdraw what audits proved of a version that does not serve: they were of earlier requests.

        A certificate stays valid; so does the proof of a version on trial.
        """
        under_way = [each.of_all for each in (self.serving, self.trial) if each is not None]
        if post.of_all not in under_way:
            post.bring_back()

    def give_up(self) -> None:
        """End a failed trial, and let a serving version without prospects begin its proof anew."""
        if self.serving.hopeless:
            self.serving.watch.prove_anew()
        for post in (self.serving, self.trial):
            if post is not None and post.waits:
                post.waits -= 1
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
        """The name of its version."""
        return str(post.version)

    def compare(self, post: Post[Version], exits: Sequence[str], serving_exit: str | None) -> None:
        """Record the exits of a trial's settings and of the serving version for one request.

        `serving_exit` is None if it was not looked up.
        """
        costs = self._costs
        if post is self.trial and post.settings and costs is not None:
            own_ms = costs.expected.base_latency_ms if serving_exit is None else cost_ms(costs, serving_exit)
            post.compare(exits, own_ms)

    def heard(self, post: Post[Version], event: Event) -> None:
        """Handle an event of a version's watch."""
        counted = f"{event.losses} of {event.audits} audits disagree"
        if post is not self.serving:
            self.settle()
        elif event.state == "stopped" or event.tightened:
            self._tightened(post, counted, stopped=event.state == "stopped")
        else:
            first, self.alarmed = post.watch.settings == 1 or self.alarmed, False
            if post.watch.settings == 1:
                self._serves(post)
                self.tell("returned", f"caches serve: {counted}")
            else:
                self.settle("returned" if first else "loosened", counted)

    def restricted(self, watch: Watch) -> None:
        """Call after settings were withdrawn because another guard of these caches found them wrong."""
        if watch is self.serving.watch:
            self._tightened(
                self.serving, "another guard of these caches found disagreements", stopped=not watch.level
            )
        else:
            self.settle()

    def _tightened(self, post: Post[Version], why: str, *, stopped: bool) -> None:
        """Fewer settings of the serving version may answer, or none."""
        if stopped:
            self.alarmed = True
            self.tell("alarm", f"caches stop: {why}")
            self._fall_back()
        else:
            self._serves(post)
            self.tell("tightened", f"a stricter setting answers: {why}")
            self.settle()

    def settle(self, kind: RosterChange = "loosened", counted: str = "") -> None:
        """Open proven settings, and let the version on trial serve if it is faster."""
        self._say_what_is_left()
        for post in (self.serving, self.trial):
            if post is not None and post.is_due:
                post.opening = post.watch.level
                self.begin_opening(post, post.opening, kind, counted)
        trial = self.trial
        if trial is not None and trial.may_hit and (not self.may_hit or self._is_faster(trial)):
            self.serve(trial)
            self.on_promoted(trial)

    def opened(
        self, post: Post[Version], level: int, version: Version, kind: RosterChange, counted: str
    ) -> None:
        """Call when a setting is open."""
        before = post.level
        post.open[level] = version
        post.opening = 0
        if post is self.serving and post.level > before:
            self._serves(post)
            what = f"setting {post.level} of {post.watch.settings} answers"
            self.tell(kind, f"{what}: {counted}" if counted else what)
        self.settle()

    def not_opened(self, post: Post[Version]) -> None:
        """Call when a setting cannot be opened. It is tried again later; open ones go on."""
        post.not_opened(0 if post is self.trial else _TRIED_AGAIN_AFTER)
        if post is self.trial:
            self.trial = None
            self.on_given_up(post)

    def replace(self, before: Post[Version], post: Post[Version]) -> None:
        """Let a post take the place of another one of the same version."""
        if self.first is before:
            self.first = post
        if self.serving is before:
            self.serve(post, self.trial)
        elif self.trial is before:
            self.trial = post

    def forget(self, post: Post[Version]) -> None:
        """Drop a version that does not serve."""
        if self.trial is post:
            self.trial = None
        if self.first is post:
            self.first = self.serving

    def _fall_back(self) -> None:
        first = self.first
        if first is self.trial or self.serving.nested or not first.nested:
            return
        self.bring_back(first)
        if first.may_hit:
            self.serve(first, self.trial)
            self.alarmed = True  # what was stopped is still to be replaced
            self.on_fell_back(first)
            self.tell("returned", f"version {self.name_of(first)} answers instead: it is certified")

    def _is_faster(self, trial: Post[Version]) -> bool:
        """Whether the trial is known to be faster. After a restart, nothing has been compared yet."""
        comparable = bool(trial.settings) and self._costs is not None
        return trial.faster and (trial.compared > 0 or not comparable)

    def _serves(self, post: Post[Version]) -> None:
        """Use the measurements of the setting that answers from now on."""
        self._costs = self.figures(post)
        self.on_serving(post)
