"""The state of a version and the promise for its answers.

A certificate counts held-out inputs once. A retrained version has none, because consecutive samples are not
independent. Its proof rejects, with an error that all proofs of a model share, that every request of its time
was answered differently with at least the tolerated probability; the guard watches what follows. See
`gati.guard.proof` and `gati.guard.detector`.
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
    """The state of a version. `agreement` is promised (None: nothing), in words in `sentence`.

    `certified`: the promise is the certificate's.
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
    if watch.may_hit and following.may_hit:
        sentence = _promise(composition, watch, retrained=retrained)
        return Stands("serving", watch.agreement, sentence, certified=not watch.proven_on)
    if following.may_hit:
        return Stands("unguarded", None, "nothing is promised: the caches answer unproven and unwatched")
    state: State = "probation" if watch.may_hit else watch.state
    return Stands(state, None, f"{_waiting(watch)}; the base model answers")


@lru_cache
def needed(agreement: float, delta: float) -> int:
    """How many audits without loss complete such a proof; cached, as every response names it."""
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
