"""Audits of requests, and the decisions that follow from them, for `gati stream` and `gati serve`.

    decided = auditor.decide(post, trial, draws, room=queue.has_room)
    ...                                     # answer the request
    needs = auditor.needs(decided, given)    # what to compute, if anything
    ...                                     # compute the reference's answer and lookups, now or later
    compared = auditor.settle(decided, given, reference, looked_up)

The auditor decides what to do with a request, and whether there is time for it, before the request is
answered. Nothing here computes or waits: a stream does the work in a thread or inline, a service in its event
loop. Dropped audits do not depend on outcomes if the caller treats all requests alike: misses take the same
path, although their audits cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol

import torch

from gati.engine.exits import BASE, Prediction
from gati.guard.draws import NOTHING, Drawn, Draws
from gati.guard.effort import Effort
from gati.guard.posts import Counting, Post, Version
from gati.guard.proof import Proof
from gati.types import RECALL as RECALL

_NO_CLASS = -1

NO_ANSWER = Prediction(_NO_CLASS, torch.empty(0), "", "")  # of a request without one


class Probed(NamedTuple):
    """The class and exit of a setting, and whether it certainly agrees with the reference."""

    class_index: int
    exit: str
    agreed: bool


def lookups_failed(post: Post[Any]) -> list[Probed]:
    """What each setting of a version says if its lookups fail: nothing that agrees."""
    return [Probed(_NO_CLASS, BASE, False)] * post.watch.settings


class Remembering(Protocol):
    """The interface of a memory that audits use."""

    @property
    def serves(self) -> bool:
        """Whether it may answer."""

    @property
    def proving(self) -> Proof | None:
        """The current proof, unless it is hopeless."""

    def learn(self, looked: Any, base: Prediction, *, drawn: bool, tried: bool = False) -> None:
        """Learn from the reference's answer to a request that was looked up."""

    def lost(self, looked: Any, *, drawn: bool) -> None:
        """Count an audit for which the reference has no answer."""


@dataclass(frozen=True)
class Decided(Generic[Version]):
    """The decision about a request, made before it is answered.

    `may_hit`: the caches of `post` may answer, at the setting `deployed` of that proven `level`; `lookups`:
    they are looked up. `counting` is the watch that counts an audit of the answer. `shadows` are looked up in
    addition, with the watches that count them. `doubted`: the reference answers instead of caches that were
    proven elsewhere. All such requests are looked up, and what these caches would have said is heard apart
    from guards and proofs (`Counting.apart`), as they do not answer them: at most, caches stop. Nor are they
    audits of the answer given: memory and the counts of audits would look better than they are. `alone`: the
    reference answers if memory does not, and not only in new scenes. `recalls`: memory may answer, before
    lookups only if caches are judged by what it leaves (`after_memory`). `post` is None if the version has
    nothing to watch.
    """

    post: Post[Version] | None
    answers: Version | None
    level: int
    counting: Counting | None
    may_hit: bool
    lookups: bool
    drawn: Drawn
    shadows: tuple[tuple[Post[Version], Counting], ...] = ()
    tried: bool = False  # it counts for a proof of memory
    doubted: bool = False
    alone: bool = False
    after_memory: bool = False
    recalls: bool = False

    @property
    def deployed(self) -> Version:
        """The setting that answers, of a watched version."""
        if self.answers is None:
            raise AssertionError("the version has nothing to watch")
        return self.answers

    @property
    def looked_at(self) -> bool:
        """Whether there is anything to do for the request."""
        return self.drawn.audit or self.drawn.sample or bool(self.shadows) or self.tried


class Given(NamedTuple):
    """The answer to a request, or `NO_ANSWER`, and its lookup in memory, if there was one."""

    prediction: Prediction
    looked: Any = None  # gati.adaptation.recall_records.Looked

    @property
    def answered(self) -> bool:
        """Whether it has an answer."""
        return self.prediction is not NO_ANSWER

    @property
    def recalled(self) -> bool:
        """Whether memory answered."""
        return self.prediction.exit == RECALL


class Needs(NamedTuple, Generic[Version]):
    """The work to do for a request.

    `known` is the reference's answer, if that was the answer given. `shadows` are versions whose settings are
    to be looked up, with the watches that count it.
    """

    known: Prediction | None
    shadows: tuple[tuple[Post[Version], Counting], ...]


class Compared(NamedTuple, Generic[Version]):
    """A comparison. `shadow`: the version did not answer the request; this is its would-be answer."""

    version: Version | None  # None: nothing to watch
    class_index: int
    base_class: int
    exit: str
    shadow: bool = False


@dataclass
class Auditor(Generic[Version]):
    """Decides which requests are looked at, and reports outcomes to watches and memory. Not thread-safe.

    `memory` learns from all reference answers. `exact`: an engine's answer at the end of its own network is
    the reference. `guarded` False: nothing is counted, requests are looked at only for samples. `audits` and
    `losses` count comparisons of answers given.
    """

    exact: bool = True
    memory: Remembering | None = None
    guarded: bool = True
    compare: Callable[[Post[Version], Sequence[str], str | None], None] | None = None
    audits: int = field(default=0, init=False)
    losses: int = field(default=0, init=False)
    left_out: int = field(default=0, init=False)  # requests for which there was no time
    _for_memory: Effort = field(default_factory=Effort, init=False, repr=False)

    def decide(
        self,
        post: Post[Version] | None,
        trial: Post[Version] | None,
        draws: Draws,
        *,
        room: Callable[[], bool],
        more_samples: float = 0.0,
        lookups_pay: bool = True,
        unguarded: bool = False,
        places: bool = True,
        new_scene: bool = False,
        repeated: bool = False,
        late: bool = False,
    ) -> Decided[Version]:
        """Decide about the next request to `post`, before its answer is known.

        `trial` is the version that waits to take over. `more_samples` is the share to sample now. `room`
        reserves a place in the queue; if it is full, the request is skipped, whatever its answer.
        `unguarded`: caches answer although nothing is proven. `places`: memory may be looked up. `new_scene`:
        what audits have proven, they did not prove on such a request, so the reference answers. Versions on
        trial, and settings that are not proven yet, will not answer such requests either: they are no part of
        their proofs, however they were drawn. `repeated`: its place showed the same just before; a
        copy is no further evidence. `late`: audits of earlier requests wait for so long that a guard would
        stop too late. The reference answers, and requests are skipped as if the queue were full, until they
        are made.
        """
        if trial is not None and post is not None and trial.of_all is post.of_all:
            trial = None  # the same caches: one watch counts one audit once
        doubts = new_scene and self.guarded and not unguarded
        counting = None if post is None else post.counting(new_scene=doubts, repeated=repeated)
        level = 0 if counting is None else counting.level
        doubted = doubts and counting is not None and counting.watch.proven_on > 0
        elsewhere = not late and (post is None or unguarded or level > 0)  # than in new scenes
        may_hit = elsewhere and not doubted
        drawn = draws.draw(more_samples)
        lookups = may_hit and lookups_pay
        after_memory = post is not None and post.after_memory
        # not where caches answer all but new scenes: what both may get wrong would add up
        alone = post is None or not elsewhere or (self.exact and not lookups_pay)
        proof = None if self.memory is None else self.memory.proving
        decided = Decided(
            post,
            None if post is None else post.at(level),
            level,
            counting,
            may_hit,
            lookups,
            drawn if self.guarded else drawn._replace(audit=False),
            tuple(
                (each, each.counting(new_scene=doubts, repeated=repeated))
                for each in ((trial,) if may_hit else (post, trial))
                if each is not None
                and self._is_looked_up(each, post, drawn, lookups=lookups, new_scene=doubts)
            ),
            places and drawn.chance < self._for_memory.share(proof, more_samples),
            doubted,
            alone,
            after_memory,
            self.memory is not None and self.memory.serves and not late and (after_memory or alone),
        )
        if decided.looked_at and (late or not room()):
            self.left_out += 1
            return replace(decided, drawn=NOTHING, shadows=(), tried=False)
        if decided.tried:
            self._for_memory.looked()
        return decided

    def unanswered(self, decided: Decided[Version]) -> Decided[Version]:
        """The decision about a request that has no answer: no one waits any more, or its engine failed.

        Misses take longest, and run more of the network: without such requests, versions on trial, settings
        that are not proven yet, and memory would be judged by easy ones. What answers is not judged, as if
        the reference had been to answer.
        """
        own, counting, drawn = decided.post, decided.counting, decided.drawn._replace(sample=False)
        shadows = decided.shadows
        if own is not None and counting is not None and decided.lookups and drawn.audit and counting.proves:
            shadows = ((own, counting._replace(answered=False)), *shadows)
        return replace(decided, may_hit=False, lookups=False, drawn=drawn, shadows=shadows)

    def _is_looked_up(
        self,
        each: Post[Version],
        post: Post[Version] | None,
        drawn: Drawn,
        *,
        lookups: bool,
        new_scene: bool,
    ) -> bool:
        """Whether to look up `each`: more often if the reference answers anyway and a proof may be near.

        In a new scene, always if it serves, but not there; otherwise only for the guard of what a certificate
        lets answer there.
        """
        if not self.guarded:
            return drawn.sample and each is post
        if new_scene:
            return each.watch.proven_on > 0 if each is post else drawn.audit and each.answers_new_scenes
        return drawn.audit or (drawn.trial and not lookups and not each.hopeless)

    def known(self, decided: Decided[Version], given: Given) -> Prediction | None:
        """The reference's answer, if it was the answer given."""
        exact = self.exact or not decided.may_hit
        return given.prediction if given.prediction.exit == BASE and exact else None

    def needs(
        self, decided: Decided[Version], given: Given, known: Prediction | None = None
    ) -> Needs[Version] | None:
        """The work to do for a request that is looked at; None if it would prove nothing.

        `known` is the reference's answer, if the caller has it.
        """
        drawn = decided.drawn
        shadows = decided.shadows if self._judges(decided, given) else ()
        looked = given.looked is not None
        judges = drawn.audit and (given.answered or looked)
        if not (judges or drawn.sample or shadows or (decided.tried and looked)):
            return None  # drawn for caches but answered by memory, or for memory without a place
        return Needs(self.known(decided, given) or known, shadows)

    def _judges(self, decided: Decided[Version], given: Given) -> bool:
        """Whether versions that do not answer are judged by the request.

        After memory, only what it would leave next to caches counts; before, all requests do. Either way, all
        of these count in the same proportion: if memory may answer some of them where no caches are looked
        up, which it does by other settings, only audits count, which are drawn from all.
        """
        if self._is_taken(decided, given):
            return False
        return decided.drawn.audit or decided.doubted or not (decided.recalls and decided.alone)

    def own(self, decided: Decided[Version], given: Given, base: Prediction) -> Post[Version] | None:
        """The version that answered, if its other settings must be looked up, too; `base` is the reference's.

        The audit takes place in any case: only the work depends on the outcome.
        """
        post = decided.post
        if post is None or not decided.drawn.audit or not decided.lookups or given.recalled:
            return None
        agreed = given.prediction.class_index == base.class_index
        return None if post.shows_all(decided.level, agreed=agreed) else post

    def learn(self, decided: Decided[Version], given: Given, base: Prediction) -> None:
        """Let memory learn from the reference's answer."""
        if self.memory is not None and given.looked is not None:
            self.memory.learn(given.looked, base, drawn=decided.drawn.audit, tried=decided.tried)

    def settle(
        self,
        decided: Decided[Version],
        given: Given,
        base: Prediction,
        shadows: Sequence[tuple[Post[Version], Counting, Sequence[Probed]]],
        own: Sequence[Probed] = (),
    ) -> list[Compared[Version]]:
        """Count the outcome for the answer given, and for the would-be answers of other versions.

        `shadows` are those of `needs`, with the answers of all their settings; `own` are the answers of all
        settings of the version that answered, if `own` asked for them.
        """
        self.learn(decided, given, base)
        found = []
        if self._is_audit(decided, given):
            found.append(self._audited(decided, given, base, own))
        left = given.prediction.exit if decided.lookups else None
        for post, counting, probed in shadows:
            apart, tried = counting.apart, self._tried(post, counting, base, probed)
            if apart:
                continue  # it is no trial of what will answer
            found.append(tried)
            if self.compare is not None and given.answered:
                self.compare(post, [each.exit for each in probed], left)
        return found

    def failed(
        self, decided: Decided[Version], given: Given, shadows: Sequence[tuple[Post[Version], Counting]]
    ) -> None:
        """Count a request for which the reference failed as a disagreement of all that were to be compared.

        Left out, it would be missing among the audits of early answers only: those of misses need no
        reference, and would prove too much.
        """
        drawn = decided.drawn.audit
        if self.memory is not None and given.looked is not None and (drawn or decided.tried):
            self.memory.lost(given.looked, drawn=drawn)
        if self._is_audit(decided, given):
            self.audits += 1
            self.losses += 1
        audited = self._of_caches(decided, given) if drawn else None
        for counting in (audited, *(counting for _, counting in shadows)):
            if counting is not None and self.guarded:
                counting.audited([False] * counting.watch.settings)

    def _is_audit(self, decided: Decided[Version], given: Given) -> bool:
        """Whether the answer given was drawn for an audit; the reference's in place of caches is none."""
        return decided.drawn.audit and given.answered and (given.recalled or not decided.doubted)

    def _of_caches(self, decided: Decided[Version], given: Given) -> Counting | None:
        """What counts an audit of the answer of the version's engine; None if there is nothing to count.

        Next to memory, a request that it would have taken is none of the rest, though it was not asked.
        """
        may_be_wrong = decided.lookups or (decided.may_hit and not self.exact)
        of_memory = given.recalled or self._is_taken(decided, given)
        return decided.counting if may_be_wrong and not of_memory else None

    def _is_taken(self, decided: Decided[Version], given: Given) -> bool:
        """Whether memory takes such requests, and leaves others to the caches."""
        return decided.after_memory and given.looked is not None and bool(given.looked.taken)

    def _audited(
        self, decided: Decided[Version], given: Given, base: Prediction, own: Sequence[Probed]
    ) -> Compared[Version]:
        """Count the answer given; `own` are those of the other settings."""
        said, post = given.prediction, decided.post
        agrees = said.class_index == base.class_index
        self.audits += 1
        self.losses += not agrees
        counting = self._of_caches(decided, given)
        if post is not None and counting is not None:
            agreed = [each.agreed for each in own] or [agrees] * max(1, len(post.settings))
            if decided.level:  # of what is open unproven, only its probe says which setting it is
                agreed[decided.level - 1] = agrees
            counting.audited(agreed, looked_up=decided.lookups)
        return Compared(decided.answers, said.class_index, base.class_index, said.exit)

    def _tried(
        self, post: Post[Version], counting: Counting, base: Prediction, probed: Sequence[Probed]
    ) -> Compared[Version]:
        """Count the would-be answers of a version; returns that of the setting to prove next."""
        watch = counting.watch
        said = probed[min(watch.level, len(probed) - 1)]
        if self.guarded:
            counting.audited([each.agreed for each in probed])
        return Compared(post.version, said.class_index, base.class_index, said.exit, shadow=True)
