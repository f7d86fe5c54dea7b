"""Several engines certified on the same inputs by one command that errs with probability at most delta.

Only the certify split shows whether an engine of reduced precision changes too many answers. Trying three
engines at the full delta each, and keeping the fastest that passes, would deploy a composition below the
target with probability up to 3 delta. Instead:

1. On the select split alone, estimate for each engine the mean latency at which a walk over this many inputs
   should end. Running an engine takes long, so the first estimate assumes that it changes no answers. The
   most promising engines then run on the select split, until no other engine's estimate is lower. Engines
   that are not expected to be faster than float32 are dropped. The others are ordered, and each gets a share
   of delta: the first gets `FIRST`, the others equal parts of the rest; a single engine gets all of it.
2. On the certify split, the first engine's path is walked at its share. The next one is walked only if its
   estimate is below the best latency reached so far. The fastest engine that passed is deployed.

Proof. Call an engine's walk wrong if it passes the first setting of its path whose true agreement is below
the target. The path depends on the select split alone, even if it is made later, and its share w was fixed
before the certify inputs were looked at. So a walk at w delta is wrong with probability at most w delta
(`gati.composition.walk`), whether or not it is used in the end. A setting below the target is deployed only
if the walk that passed it was wrong. The shares add up to at most 1, so that happens with probability at most
delta, whichever engines were walked, and however the deployed one was chosen among them.

The shares. The gain of a walk falls by about the same amount whenever the logarithm of its level falls by
one. The expected loss is the sum of p log(1 / w) over engines, where p is the probability that an engine is
deployed. It is least for w = p. The most promising engine is deployed nine times out of ten or more, hence
`FIRST`. With 1,500 inputs and delta 0.05, nine tenths of delta allow as many disagreements as all of it: 33
at 0.97 and 8 at 0.99; a third of delta allows 31 and 6.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gati.composition.certificate import Certificate, EngineWalk
from gati.composition.certified import Proposal, TooCoarseError
from gati.composition.outcomes import SplitOutcomes
from gati.composition.plans import CandidatePlan
from gati.errors import BackendError, CompositionError

_log = logging.getLogger(__name__)
FIRST = 0.9  # the most promising engine's share of delta, if there are several
WORTH_ASKING = 0.97  # an engine of reduced precision must be expected below this share of float32's latency


@dataclass(frozen=True)
class Hope:
    """An engine of reduced precision that has not run yet, since running it takes long."""

    backend: str
    at_best_ms: float  # expected mean latency if it answered as in float32
    ask: Callable[[], Proposal]  # raises CompositionError if it cannot reach the accuracy, BackendError


@dataclass(frozen=True)
class Entrant:
    """An engine that takes part: its expected latency, its share of delta, and how its path is made."""

    backend: str
    hoped_ms: float
    proposal: Callable[[], Proposal]  # raises as `Hope.ask`
    share: float = 1.0


def shares(engines: int) -> tuple[float, ...]:
    """Return the shares of delta, the most promising engine's first; they add up to at most 1."""
    if engines == 1:
        return (1.0,)
    return (FIRST, *((1.0 - FIRST) / (engines - 1),) * (engines - 1))


def enter(
    reference: Proposal, others: Sequence[Hope], inputs: int, *, draws: int | None = None
) -> tuple[Entrant, ...]:
    """Return the engines that take part, the most promising first, from the select split alone.

    `reference` is the proposal in float32, which always takes part; `inputs` is the number to certify on, and
    `draws` that of inputs that count if they are lost, by default the same.
    """
    profile = reference.library.manifest.profile
    alone_ms = reference.hoped_ms(inputs, draws=draws)
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
        except BackendError as error:
            _log.warning("%s", error)
            continue
        hoped_ms = proposal.hoped_ms(inputs, FIRST, draws=draws)
        if hoped_ms is not None and hoped_ms <= limit_ms:
            asked.append(Entrant(hope.backend, hoped_ms, partial(_same, proposal)))
    later = [Entrant(each.backend, each.at_best_ms, each.ask) for each in hopes]
    entrants = [*sorted(asked, key=lambda each: each.hoped_ms), *later, float32]
    every = zip(entrants, shares(len(entrants)), strict=True)
    return tuple(replace(entrant, share=share) for entrant, share in every)


def _same(proposal: Proposal) -> Proposal:
    return proposal


def _with_counts(walk: EngineWalk, found: Certificate | None) -> EngineWalk:
    if found is None:
        return walk
    digest = None if found.walked_on is None else found.walked_on.path_sha256
    return replace(walk, certified=found.certified, path_sha256=digest, tested=found.tested)


def deploy_one(
    entrants: Sequence[Entrant], certified_on: Callable[[Proposal], SplitOutcomes | None]
) -> tuple[Proposal, CandidatePlan]:
    """Walk the engines' paths on the certify split, in order; return the one to deploy with its plan.

    If several took part, the plan's certificate lists them under "engines". Float32 always has a plan, if
    necessary one without caches, with a certificate if anything was counted for another engine.
    """
    best: tuple[Entrant, Proposal, CandidatePlan] | None = None
    tried: list[EngineWalk] = []
    for entrant in entrants:
        if best is not None and best[2].expected.mean_latency_ms <= entrant.hoped_ms:
            continue
        walk = EngineWalk(
            backend=entrant.backend, share_of_delta=entrant.share, hoped_ms=entrant.hoped_ms, certified=False
        )
        try:
            proposal = entrant.proposal()
            plan = proposal.deploy(certified_on(proposal), entrant.share)
        except (BackendError, CompositionError) as refusal:
            counted = refusal.certificate if isinstance(refusal, TooCoarseError) else None
            tried.append(replace(_with_counts(walk, counted), reason=str(refusal)))
            continue
        tried.append(_with_counts(walk, plan.certificate))
        if best is None or plan.expected.mean_latency_ms < best[2].expected.mean_latency_ms:
            best = entrant, proposal, plan
    if best is None:
        raise CompositionError(f"no engine can be certified: {tried[-1].reason}")
    entrant, proposal, plan = best
    if plan.certificate is None and any(each.tested for each in tried):
        plan = replace(plan, certificate=proposal.uncounted(entrant.share))
    if len(entrants) > 1 and plan.certificate is not None:
        plan = replace(plan, certificate=replace(plan.certificate, engines=tuple(tried)))
    return proposal, plan
