"""A loaded version of a served model: its state, and the promise for its answers.

A certificate is an exact test on held-out inputs. A retrained version has none, because consecutive samples
are not independent; instead it needs a proof by audits. A complete proof rejects the hypothesis that every
audit was a loss with at least the tolerated probability (`gati.guard.proof`). All proofs of a model share one
error probability. After the proof, the guard watches the version (`gati.guard.detector`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from gati.composition.composition import Composition
from gati.composition.plans import DEFAULT_CONFIDENCE
from gati.engine.engine import Engine
from gati.engine.exits import BASE
from gati.errors import CompositionError
from gati.guard.posts import Post
from gati.guard.proof import Proof
from gati.guard.standing import identity_of
from gati.guard.watch import Watch
from services.inference.following import Answering, Following
from services.inference.queue import RequestQueue
from services.wire.gen.ttypes import ProofProgress, VersionInfo


class TooManyVersionsError(CompositionError):
    """As many versions are loaded as `most_versions` allows; possible once one is unloaded."""


def unwatched() -> Watch:
    """A watch that counts nothing, for answers of the user's own network."""
    return Watch(0.5, spend=lambda: 0.5, proven=True)


State = Literal["serving", "probation", "stopped", "unguarded"]


class Stands(NamedTuple):
    """The state of a version, and its promise.

    `agreement` is the promised agreement, None without a promise. `sentence` is the promise, or why there is
    none. `certified`: its own certificate is the basis of the promise, not a proof by audits or another
    version's certificate of the same caches.
    """

    state: State
    agreement: float | None
    sentence: str
    certified: bool = False


def stands(composition: Composition | None, following: Following, *, retrained: bool) -> Stands:
    """The current state of a version."""
    watch = following.watch
    if watch is None or composition is None:
        return Stands("serving", None, "every answer is the base model's")
    of = " of requests that memory leaves" if following.after_memory else ""
    if watch.may_hit and following.may_hit:
        own = not watch.proven_on and certifies(composition, retrained=retrained)
        return Stands("serving", watch.agreement, _promise(composition, watch, own=own) + of, certified=own)
    if following.may_hit:
        return Stands("unguarded", None, "nothing is promised: the caches answer unproven and unwatched")
    state: State = "probation" if watch.may_hit else watch.state
    return Stands(state, None, f"{_waiting(watch, of)}; the base model answers")


def certifies(composition: Composition, *, retrained: bool) -> bool:
    """Whether the certificate of a composition proves the promise of a version that is loaded from it."""
    confidence = composition.confidence or DEFAULT_CONFIDENCE
    return not retrained and composition.proves(composition.accuracy_target, confidence)


@lru_cache
def needed(agreement: float, delta: float) -> int:
    """How many audits without a loss complete such a proof; cached, because every response may name it."""
    return Proof(agreement, delta).required


def _promise(composition: Composition, watch: Watch, *, own: bool) -> str:
    said = f"at least {100.0 * watch.agreement:g} % of answers are the base model's"
    certificate = composition.certificate
    if certificate is not None and certificate.by_class and not own:
        said += ", over all classes together"
    if watch.proven_on:
        return f"{said}, proven on {watch.proven_on} audits"
    if certificate is not None and own:
        confidence = certificate.confidence
    else:  # the same caches were certified since, as surely as this version asks
        confidence = composition.confidence or DEFAULT_CONFIDENCE
    return f"{said}, certified with {100.0 * confidence:g} % confidence"


def _waiting(watch: Watch, of: str) -> str:
    proof = watch.proof
    if watch.may_hit:
        return f"proven on {watch.proven_on} audits{of}, its setting is being opened"
    if proof is None:
        raise AssertionError("caches that do not serve are being proven")
    differ = f", {proof.losses} of them disagree" if proof.losses else ""
    progress = f"{proof.audits} of about {needed(proof.agreement, proof.delta)} audits{of}{differ}"
    return f"on probation: {progress}" if watch.state == "probation" else f"stopped by the guard: {progress}"


@dataclass(eq=False)
class LoadedVersion:
    """A loaded version: `answering` as it was published, and its `post` with the open settings.

    `base` is the queue of the reference. `source`, a `VersionSource`, says what the version was loaded from.
    """

    answering: Answering
    post: Post[Answering]
    following: Following
    base: RequestQueue | None
    retrained: bool
    source: Any
    _requests: int = field(default=0, init=False, repr=False)  # that use it
    _unused: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)
    _exits: tuple[str, ...] = field(default=(), init=False, repr=False)  # of the settings `_exits_of`
    _exits_of: tuple[Answering, ...] = field(default=(), init=False, repr=False)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Keep it open, with all its queues, while a request is prepared and answered."""
        self._requests += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._unused.set()

    async def unused(self) -> None:
        """Wait until no request uses it."""
        while self._requests:
            await self._unused.wait()

    @property
    def name(self) -> str:
        """The version's name."""
        return self.answering.name

    @property
    def engine(self) -> Engine:
        """The engine of the version as it was published."""
        return self.answering.engine

    @property
    def composition(self) -> Composition | None:
        """The composition of the version as it was published; None without caches."""
        return self.answering.composition

    def is_judged_with(self, chosen: Composition) -> bool:
        """Whether one watch judges this version and that composition: their caches and promise are equal."""
        own = self.composition
        if own is None or own.accuracy_target != chosen.accuracy_target:
            return False
        return identity_of(own) == identity_of(chosen)

    @property
    def answerings(self) -> list[Answering]:
        """The version as it was published, and all open settings."""
        return list(dict.fromkeys((self.answering, *self.post.open.values())))

    @property
    def queues(self) -> list[RequestQueue]:
        """The queues of all `answerings`, and the reference's."""
        return [each.queue for each in self.answerings] + ([] if self.base is None else [self.base])

    @property
    def exits(self) -> tuple[str, ...]:
        """The exits that answers may come from, in forward order; kept, because every request needs them."""
        settings = tuple(self.post.open.values())
        if not self._exits or settings != self._exits_of:
            compositions = [each.composition for each in self.answerings if each.composition is not None]
            blocks = {leaving.block: leaving.block_index for each in compositions for leaving in each.exits}
            self._exits = (*sorted(blocks, key=lambda block: blocks[block]), BASE)
            self._exits_of = settings
        return self._exits

    @property
    def standing(self) -> Stands:
        """Its current state and promise."""
        return stands(self.composition, self.following, retrained=self.retrained)

    @cached_property
    def certificate_json(self) -> str | None:
        """Its certificate; None without one."""
        certificate = None if self.composition is None or self.retrained else self.composition.certificate
        return None if certificate is None else json.dumps(certificate.to_json())

    @cached_property
    def certificate_id(self) -> str | None:
        """Identifies its certificate, as another composition may be loaded under the same name."""
        content = self.certificate_json
        return None if content is None else hashlib.sha256(content.encode()).hexdigest()[:16]

    def describe(self, *, active: bool, pending: bool = False) -> Any:
        """As the wire's `VersionInfo`."""
        standing, watch = self.standing, self.following.watch
        proof = None if watch is None else watch.proof
        return VersionInfo(
            version=self.name,
            active=active,
            backend=self.post.deployed.engine.backend,
            certificate_json=self.certificate_json,
            exits=list(self.exits),
            memory_bytes=sum(leaving.memory_bytes for leaving in self.post.deployed.engine.exits),
            state=standing.state,
            pending=pending,
            agreement=standing.agreement,
            promise=standing.sentence,
            proof=None
            if proof is None
            else ProofProgress(proof.audits, proof.losses, needed(proof.agreement, proof.delta)),
            audits=0 if watch is None else watch.audits,
            losses=0 if watch is None else watch.losses,
            level=0 if watch is None else self.post.level,
            settings=0 if watch is None else watch.settings,
            resting=self.following.resting,
            target=None if watch is None else watch.agreement,
            source=self.source,
            certificate_id=self.certificate_id,
        )
