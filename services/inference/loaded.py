"""A loaded version of a served model, and its description."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gati.composition.composition import Composition
from gati.engine.engine import Engine
from gati.engine.exits import BASE
from gati.guard.posts import Post
from services.inference.following import Answering, Following
from services.inference.queue import RequestQueue
from services.inference.standing import Stands, needed, stands
from services.wire.gen.ttypes import ProofProgress, VersionInfo

__all__ = ["LoadedVersion"]


@dataclass(eq=False)
class LoadedVersion:
    """A loaded version: `answering` as it was published, and its `post` with the settings that are open.

    `base` gives the reference answer. `source` is the wire's record of what it was loaded from.
    """

    answering: Answering
    post: Post[Answering]
    following: Following
    base: RequestQueue | None
    retrained: bool
    source: Any

    @property
    def name(self) -> str:
        """The version's name."""
        return self.answering.name

    @property
    def engine(self) -> Engine:
        """As it was published."""
        return self.answering.engine

    @property
    def composition(self) -> Composition | None:
        """As it was published."""
        return self.answering.composition

    @property
    def answerings(self) -> list[Answering]:
        """All open settings."""
        return list(dict.fromkeys((self.answering, *self.post.open.values())))

    @property
    def queues(self) -> list[RequestQueue]:
        """The queues of all open settings, and the reference's."""
        return [each.queue for each in self.answerings] + ([] if self.base is None else [self.base])

    @property
    def exits(self) -> tuple[str, ...]:
        """The exits that answers may come from, in forward order."""
        compositions = [each.composition for each in self.answerings if each.composition is not None]
        blocks = {leaving.block: leaving.block_index for each in compositions for leaving in each.exits}
        return (*sorted(blocks, key=lambda block: blocks[block]), BASE)

    @property
    def standing(self) -> Stands:
        """Its state, and what is promised."""
        return stands(self.composition, self.following, retrained=self.retrained)

    def describe(self, *, active: bool, pending: bool = False) -> Any:
        """The wire's `VersionInfo`."""
        standing, watch = self.standing, self.following.watch
        certificate = None if self.composition is None or self.retrained else self.composition.certificate
        proof = None if watch is None else watch.proof
        return VersionInfo(
            version=self.name,
            active=active,
            backend=self.post.deployed.engine.backend,
            certificate_json=None if certificate is None else json.dumps(certificate.to_json()),
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
        )
