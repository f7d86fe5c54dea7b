"""What can be said of a version: whether its caches answer, and what is promised of its answers.

A certificate counts inputs once that nobody chose by. A retrained version has none: what is sampled one after
the other is not independent. Of it a proof says, with the error that all proofs of a model share, that not
every request of its time was answered otherwise with the tolerated probability or a greater one; and the
guard watches what follows. See `gati.guard.proof` and `gati.guard.detector`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from gati.composition.composition import Composition
from gati.composition.verdicts import DEFAULT_CONFIDENCE
from gati.guard.proof import Proof
from gati.guard.watch import Watch
from services.inference.following import Following

__all__ = ["Stands", "State", "needed", "stands"]

State = Literal["serving", "probation", "stopped", "unguarded"]


class Stands(NamedTuple):
    """How a version stands. `agreement` is what is promised, None for nothing; `sentence` says it.

    `certified`: that rests on its certificate.
    """

    state: State
    agreement: float | None
    sentence: str
    certified: bool = False


def stands(composition: Composition | None, following: Following, *, retrained: bool) -> Stands:
    """How a version stands now."""
    watch = following.watch
    if watch is None or composition is None:
        return Stands("serving", None, "every answer is the base model's")
    if watch.may_hit and following.may_hit:
        sentence = _promise(composition, watch, retrained=retrained)
        return Stands("serving", watch.agreement, sentence, certified=not watch.proven_on)
    if following.may_hit:
        return Stands("unguarded", None, "nothing is promised: the caches answer unproven and unwatched")
    state: State = "probation" if watch.may_hit else watch.state
    return Stands(state, None, f"{_waiting(watch)}; the base model answers")


@lru_cache
def needed(agreement: float, delta: float) -> int:
    """How many audits complete such a proof, if none is a loss; every response says so, so it is kept."""
    return Proof(agreement, delta).required


def _promise(composition: Composition, watch: Watch, *, retrained: bool) -> str:
    said = f"at least {100.0 * watch.agreement:g} % of answers are the base model's"
    certificate = composition.certificate
    if certificate is not None and certificate.by_class and (watch.proven_on or retrained):
        said += ", over all classes together"
    if watch.proven_on:
        return f"{said}, proven on {watch.proven_on} audits"
    confidence = DEFAULT_CONFIDENCE if certificate is None else certificate.confidence
    return f"{said}, certified with {100.0 * confidence:g} % confidence"


def _waiting(watch: Watch) -> str:
    proof = watch.proof
    if watch.may_hit:
        return f"proven on {watch.proven_on} audits, and being opened"
    if proof is None:
        raise AssertionError("caches that do not serve are being proven")
    differ = f", {proof.losses} of them losses" if proof.losses else ""
    progress = f"{proof.audits} of about {needed(proof.agreement, proof.delta)} audits{differ}"
    return f"on probation: {progress}" if watch.state == "probation" else f"stopped by the guard: {progress}"
