"""Several engines certified on the same inputs by one command that errs with probability at most delta.

Whether an engine of reduced precision loses too many answers shows on the certify split alone. Trying three
engines at the full delta each, and keeping the fastest that passes, would deploy a composition below the
target with probability up to 3 delta. Instead:

1. On the select split alone: estimate what each engine can reach, the mean latency at which a walk over this
   many inputs should end. Asking an engine takes long, so first as if it lost nothing; the most promising are
   asked for what they lose, until no other could hope for less. Engines that hope for no less than float32
   are dropped. Those left are put in order, and each gets a share of delta: the first `FIRST`, the others the
   rest in equal parts; an engine left alone gets all of it.
2. On the certify split: the first walks at its share. The next is walked only if it hopes for less than what
   has been reached so far. The fastest of those that passed is deployed.

Proof. Call an engine's walk wrong if it passes the first setting of its path whose true agreement is below
the target. Its path depends on the select split alone, even if it is laid later, and its share w was fixed
before the certify inputs were looked at. So a walk at w delta is wrong with probability at most w delta
(`gati.composition.certificate`), whether or not it is taken in the end. A setting below the target is
deployed only where the walk that passed it was wrong. The shares add up to at most 1, so that happens with
probability at most delta, whichever engines were walked, for whatever reason, and however the one to deploy
was picked among them.

The shares. What a walk gains falls by about the same amount whenever the logarithm of its level falls by one.
The expected loss, the sum of p log(1 / w) over engines, p how likely it is that this one is deployed, is
least where w = p. The most promising is deployed nine times out of ten or more, hence `FIRST`. With 1,500
inputs and delta 0.05, nine tenths of delta allow the same 33 disagreements at 0.97, and 8 at 0.99; a third 31
and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gati.composition.certificate import EngineWalk
from gati.composition.certified import Proposal
from gati.composition.outcomes import SplitOutcomes
from gati.composition.plans import CandidatePlan
from gati.errors import CompositionError

FIRST = 0.9  # of delta: the most promising engine's share, where there are several
WORTH_ASKING = 0.97  # of the least latency hoped for so far: what an engine of reduced precision may hope for


@dataclass(frozen=True)
class Hope:
    """An engine of reduced precision before it runs: running it takes long."""

    backend: str
    at_best_ms: float  # its latency if it answered as float32 does
    ask: Callable[[], Proposal]  # raises CompositionError where it cannot promise the accuracy


@dataclass(frozen=True)
class Entrant:
    """An engine that takes part: the latency it hopes for, its share of delta, how its path is laid."""

    backend: str
    hoped_ms: float
    proposal: Callable[[], Proposal]  # raises CompositionError as `Hope.ask`
    share: float = 1.0


def shares(engines: int) -> tuple[float, ...]:
    """Return the shares of delta, the most promising engine's first; they add up to at most 1."""
    if engines == 1:
        return (1.0,)
    return (FIRST, *((1.0 - FIRST) / (engines - 1),) * (engines - 1))


def enter(reference: Proposal, others: Sequence[Hope], inputs: int) -> tuple[Entrant, ...]:
    """Return the engines that take part, the most promising first, from the select split alone.

    `reference` is the proposal in float32, which always does; `inputs` is how many there are to certify on.
    """
    profile = reference.library.manifest.profile
    alone_ms = reference.hoped_ms(inputs)
    float32 = Entrant(profile.backend, profile.base_ms if alone_ms is None else alone_ms, lambda: reference)
    limit_ms = WORTH_ASKING * float32.hoped_ms
    hopes = sorted((each for each in others if each.at_best_ms <= limit_ms), key=lambda each: each.at_best_ms)
    asked: list[Entrant] = []
    while hopes and hopes[0].at_best_ms <= min((each.hoped_ms for each in asked), default=limit_ms):
        hope = hopes.pop(0)
        try:
            proposal = hope.ask()
        except CompositionError:  # that precision cannot promise the accuracy
            continue
        hoped_ms = proposal.hoped_ms(inputs, FIRST)
        if hoped_ms is not None and hoped_ms <= limit_ms:
            asked.append(Entrant(hope.backend, hoped_ms, partial(_same, proposal)))
    later = [Entrant(each.backend, each.at_best_ms, each.ask) for each in hopes]
    entrants = [*sorted(asked, key=lambda each: each.hoped_ms), *later, float32]
    every = zip(entrants, shares(len(entrants)), strict=True)
    return tuple(replace(entrant, share=share) for entrant, share in every)


def _same(proposal: Proposal) -> Proposal:
    return proposal


def deploy_one(
    entrants: Sequence[Entrant], certified_on: Callable[[Proposal], SplitOutcomes | None]
) -> tuple[Proposal, CandidatePlan]:
    """Walk the engines on the certify split, in order, and return the one to deploy with its plan.

    The plan's certificate lists under "engines" what was tried, if several took part. Float32 always has a
    plan, if need be one without caches.
    """
    best: tuple[Proposal, CandidatePlan] | None = None
    tried: list[EngineWalk] = []
    for entrant in entrants:
        if best is not None and best[1].expected.mean_latency_ms <= entrant.hoped_ms:
            continue
        walk = EngineWalk(
            backend=entrant.backend, share_of_delta=entrant.share, hoped_ms=entrant.hoped_ms, certified=False
        )
        try:
            proposal = entrant.proposal()
            plan = proposal.deploy(certified_on(proposal), entrant.share)
        except CompositionError as refusal:
            tried.append(replace(walk, reason=str(refusal)))
            continue
        if (found := plan.certificate) is not None:
            digest = None if found.walked_on is None else found.walked_on.path_sha256
            walk = replace(walk, certified=found.certified, path_sha256=digest, tested=found.tested)
        tried.append(walk)
        if best is None or plan.expected.mean_latency_ms < best[1].expected.mean_latency_ms:
            best = proposal, plan
    if best is None:
        raise CompositionError(f"no engine can be certified: {tried[-1].reason}")
    proposal, plan = best
    if len(entrants) > 1 and plan.certificate is not None:
        plan = replace(plan, certificate=replace(plan.certificate, engines=tuple(tried)))
    return proposal, plan
