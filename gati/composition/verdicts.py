"""Counting settings on the certify split, and adding certificates to plans."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gati.composition.accuracy import accuracy_drop
from gati.composition.certificate import Certificate, LossCounts, NewInputs, WalkedOn
from gati.composition.copies import counted
from gati.composition.outcomes import SplitOutcomes, cost_of
from gati.composition.plans import DEFAULT_CONFIDENCE, CandidatePlan, Settings, problem_of
from gati.composition.problem import Candidate
from gati.composition.replay import Replay, summarise
from gati.composition.walk import certify, certify_every_class, count_by_class
from gati.exploration.library import Library


def certify_published(
    library: Library,
    settings: Settings,
    plan: CandidatePlan,
    certified_on: SplitOutcomes | None,
    share: float = 1.0,
) -> CandidatePlan:
    """Certify the single setting that a published form planned, at a share of delta."""
    if settings.confidence is None or certified_on is None or not plan.exits:
        return plan
    chosen = plan.choice.candidates
    counts = count_losses(library, settings, chosen, certified_on)
    certificate = certify_one(library, settings, counts, share)
    return with_certificate(library, settings, plan, certificate, certified_on, [chosen])


def count_losses(
    library: Library, settings: Settings, candidates: tuple[Candidate, ...], split: SplitOutcomes
) -> tuple[LossCounts, ...]:
    """Return how many inputs of `split` get another class with these exits, and the number of inputs.

    There is one pair for all inputs, or one per class if every class is certified.
    """
    return counts_of(library, settings, replay_of(library, settings, candidates, split), split)


def counts_of(
    library: Library, settings: Settings, replay: Replay, split: SplitOutcomes
) -> tuple[LossCounts, ...]:
    """Return the counts of `count_losses` from a replay of `split`, as `gati.composition.copies` counts."""
    rows = counted(replay.wrong, *split.copies)
    if not settings.per_class:
        return (LossCounts(int(replay.wrong[rows].sum()), len(rows)),)
    return count_by_class(replay.answer[rows], split.base_class[rows], library.manifest.classes)


def certify_one(
    library: Library, settings: Settings, counts: Sequence[LossCounts], share: float = 1.0
) -> Certificate:
    """Certify one setting that was fixed beforehand, from its `count_losses`."""
    return walk_through(library, settings, [counts], 1, share)


def walk_through(
    library: Library, settings: Settings, path: Iterable[Sequence[LossCounts]], length: int, share: float
) -> Certificate:
    """Walk through `path`, the counts of `length` settings, with a share of delta."""
    accuracy, delta = settings.accuracy, 1.0 - (settings.confidence or DEFAULT_CONFIDENCE)
    if settings.per_class:
        names = library.manifest.class_names or ()
        return certify_every_class(path, accuracy, delta, names, share=share, settings=length)
    return certify((counts for (counts,) in path), accuracy, delta, share=share, settings=length)


def replay_of(
    library: Library, settings: Settings, candidates: tuple[Candidate, ...], split: SplitOutcomes
) -> Replay:
    """Send every input of `split` through the exits `candidates`."""
    return split.replay(problem_of(library, settings, candidates, one_lookup_at_a_time=False), candidates)


def with_certificate(
    library: Library,
    settings: Settings,
    plan: CandidatePlan,
    certificate: Certificate,
    split: SplitOutcomes | None,
    path: Sequence[Sequence[Candidate]],
) -> CandidatePlan:
    """Return the plan with its certificate and its latency on the certify split.

    The certificate stores a hash of `path`, the settings of the walk, so that repetitions are recognised.
    """
    on, drop = walked_on(library, path), None
    if split is not None:
        # if nothing is deployed, the counts are those of the strictest setting
        setting = plan.choice.candidates if plan.exits else tuple(path[0])
        outcome = replay_of(library, settings, setting, split)
        certificate = replace(certificate, new_inputs=NewInputs.of(outcome.wrong, split.copies))
    if split is not None and plan.exits:
        sample = _of_new_inputs(library, settings, plan.choice.candidates, outcome, split)
        on = replace(
            on,
            mean_latency_ms=sample.mean_latency_ms,
            gain=plan.expected.base_latency_ms / sample.mean_latency_ms,
            hit_rate=sample.hit_rate,
        )
        if split.label is not None:
            known = split.label >= 0  # further inputs have no labels
            drop = accuracy_drop(
                outcome.answer[known],
                split.base_class[known],
                split.label[known],
                certificate.delta,
                settings=certificate.settings,
                share=certificate.share,
                copies=split.copies.of(known),
            )
    return replace(plan, certificate=replace(certificate, walked_on=on, accuracy_drop=drop))


def _of_new_inputs(
    library: Library,
    settings: Settings,
    candidates: tuple[Candidate, ...],
    outcome: Replay,
    split: SplitOutcomes,
) -> Replay:
    """The outcome over the inputs that trained and chose nothing, each once; over all if there are none."""
    new = split.copies.same > 0
    if new.all() or not new.any():
        return outcome
    problem = problem_of(library, settings, candidates, one_lookup_at_a_time=False)
    costs = [cost_of(problem, candidate) for candidate in candidates]
    return summarise(costs, outcome.left_at[new], outcome.answer[new], split.base_class[new], problem.base_ms)


def walked_on(library: Library, path: Sequence[Sequence[Candidate]]) -> WalkedOn:
    """Return what identifies a walk through `path` on the engine of `library`, without figures."""
    settings = [[(each.trial_id, each.threshold) for each in candidates] for candidates in path]
    return WalkedOn(
        backend=library.manifest.profile.backend,
        split_seed=library.manifest.seed,
        path_sha256=hashlib.sha256(json.dumps(settings).encode()).hexdigest(),
    )
