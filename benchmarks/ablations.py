"""Ablations: leave out one part of a composition at a time and keep everything else the same.

    python -m benchmarks.ablations runs/benchmark/resnet56 --backend openvino

Every row is certified on the same inputs at the same confidence, by a walk along a path that was chosen
without them. `gain` comes from replaying the certify inputs with the measured latencies of the backend.

* memory: a quarter, half, twice and four times the memory of the composition without a limit;
* families: leave out one family of predictors;
* greedy: add exits one at a time, each the one that saves most, instead of searching them jointly;
* other latencies: choose exits and thresholds with the latencies of another backend (`--chosen-on`), then
  certify and replay on this one, to show the value of hardware-aware composition;
* relaxed, full: the published formulations, whose single setting is either certified or not.

Nothing is timed unless the library lacks the latencies of a backend. For ablations of the training losses see
`benchmarks.students`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gati.composition.certified import Proposal, propose
from gati.composition.contests import STEPS, Contest, candidates_of
from gati.composition.costs import CostedLibrary, on_backend
from gati.composition.exact import SEARCH, ExactChoice
from gati.composition.instance import Chosen, Instance
from gati.composition.outcomes import SplitOutcomes
from gati.composition.plans import SLOWDOWN, CandidatePlan, Settings, plan_published
from gati.composition.risk import smoothed_loss
from gati.composition.verdicts import certify_published
from gati.exploration.library import CERTIFY, SELECT, Library
from gati.types import Trial

TARGETS = (0.97, 0.99)
MEMORY = (0.25, 0.5, 2.0, 4.0)
_GREEDY_CUTS = 60  # thresholds per trial that greedy tries


class Without(Library):
    """A library without some of its trials."""

    def __init__(self, whole: Library, keep: Callable[[Trial], bool]) -> None:
        super().__init__(whole.directory)
        self._whole, self._keep = whole, keep

    @cached_property
    def manifest(self) -> Any:
        """Same as `Library.manifest`."""
        return self._whole.manifest

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """Same as `Library.trials`."""
        return tuple(trial for trial in self._whole.trials if self._keep(trial))


def main() -> int:
    """Compose once per row; print one JSON document to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--backend", default="openvino")
    parser.add_argument("--chosen-on", default="torch", help="backend whose latencies 'other latencies' uses")
    parser.add_argument("--slowdown", type=float, default=SLOWDOWN)
    arguments = parser.parse_args()
    plain = Library.open(arguments.library)
    library, other = on_backend(plain, arguments.backend), on_backend(plain, arguments.chosen_on)
    if isinstance(library, CostedLibrary) and library.answers is not None:
        raise SystemExit("error: replays need a backend in float32, such as openvino or onnxruntime")
    document = [
        {"target": target, "rows": rows_of(library, other, Settings(target, slowdown=arguments.slowdown))}
        for target in TARGETS
    ]
    json.dump(document, sys.stdout, indent=1)
    print()
    return 0


def rows_of(library: Library, other: Library, settings: Settings) -> list[dict[str, Any]]:
    """Return the full composition's row, then one row per part left out."""
    select, certify = (SplitOutcomes(library, split) for split in (SELECT, CERTIFY))

    def exact(of: Library, asked: Settings) -> CandidatePlan:
        select, certify = (SplitOutcomes(of, split) for split in (SELECT, CERTIFY))
        return propose(of, asked, ["inline"], select, certify.copies.evidence).deploy(certify)

    whole = exact(library, settings)
    rows = [row("everything", whole)]
    for factor in MEMORY:
        limited = replace(settings, memory_limit_bytes=int(factor * whole.expected.memory_bytes))
        rows.append(row(f"memory x {factor:g}", exact(library, limited)))
    trained = [trial.variant.partition("(")[0] for trial in library.trials if trial.status == "trained"]
    for family in sorted(set(trained)):
        rest = Without(library, lambda trial, out=family: trial.variant.partition("(")[0] != out)
        rows.append(row(f"without {family}", exact(rest, settings)))
    proposal = propose(library, settings, ["inline"], select, len(certify))
    rows.append(row("greedy", walked(proposal, greedy_path(proposal.contest.instance, settings), certify)))
    elsewhere = propose(other, settings, ["inline"], SplitOutcomes(other, SELECT), len(certify))
    rows.append(row("other latencies", walked(proposal, moved(elsewhere, proposal.contest), certify)))
    for form in ("relaxed", "full"):
        asked = replace(settings, objective=form)
        plan = plan_published(library, asked, "inline", select)
        rows.append(row(form, certify_published(library, asked, plan, certify)))
    return rows


def row(name: str, plan: CandidatePlan) -> dict[str, Any]:
    """Return a plan's results on the certify inputs; the gain is 1 if it is not certified."""
    certificate = plan.certificate
    certified = certificate is not None and certificate.certified and bool(plan.exits)
    found = certificate.walked_on if certificate is not None and certified else None
    return {
        "name": name,
        "certified": certified,
        "gain": found.gain if found else 1.0,
        "hit_rate": found.hit_rate if found else 0.0,
        "exits": [f"{leaving.block} {leaving.variant}" for leaving in plan.exits],
        "memory_bytes": plan.expected.memory_bytes,
    }


def walked(proposal: Proposal, path: Sequence[ExactChoice], certify: SplitOutcomes) -> CandidatePlan:
    """Return the plan at which a walk along another path of the same contest ends."""
    candidates = tuple(candidates_of(proposal.contest, choice.chosen) for choice in path)
    settings = tuple(range(len(path)))
    return replace(proposal, path=tuple(path), candidates=candidates, main=settings).deploy(certify)


def greedy_path(instance: Instance, settings: Settings) -> list[ExactChoice]:
    """Return a setting per budget of the exact path, adding exits one at a time while one saves time."""
    risky = replace(instance, loss=smoothed_loss(instance))
    tolerated = (1.0 - settings.accuracy) * instance.inputs
    path: list[ExactChoice] = []
    for budget in (share * tolerated for share in STEPS):
        chosen: Chosen = ()
        while (better := _one_more(risky, chosen, budget)) is not None:
            chosen = better
        outcome = instance.outcome(chosen)
        if outcome.mean_latency_ms < (path[-1].outcome.mean_latency_ms if path else instance.base_ms):
            path.append(ExactChoice(chosen, outcome, 0.0, SEARCH))
    return path


def _one_more(instance: Instance, chosen: Chosen, budget: float) -> Chosen | None:
    best, best_ms = None, instance.outcome(chosen).mean_latency_ms
    taken = {int(instance.block[trial]) for trial, _ in chosen}
    for trial in range(instance.trials):
        if int(instance.block[trial]) in taken:
            continue
        cuts = np.flatnonzero(instance.may_cut[trial]) + 1
        for cut in cuts[:: max(1, len(cuts) // _GREEDY_CUTS)]:
            wider = tuple(sorted((*chosen, (trial, int(cut)))))
            outcome = instance.outcome(wider)
            fits = outcome.disagreements <= budget and instance.allows(wider)
            if fits and outcome.mean_latency_ms < best_ms:
                best, best_ms = wider, outcome.mean_latency_ms
    return best


def moved(proposal: Proposal, contest: Contest) -> list[ExactChoice]:
    """Return another backend's path as settings of this contest, which has the same trials and scores."""
    position = {trial.trial_id: at for at, trial in enumerate(contest.trials)}
    path = []
    for choice in proposal.path:
        named = [(proposal.contest.trials[trial].trial_id, cut) for trial, cut in choice.chosen]
        if all(name in position for name, _ in named):
            chosen = tuple(sorted((position[name], cut) for name, cut in named))
            path.append(ExactChoice(chosen, contest.instance.outcome(chosen), 0.0, SEARCH))
    return path


if __name__ == "__main__":
    sys.exit(main())
