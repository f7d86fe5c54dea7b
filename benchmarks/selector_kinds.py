"""Compare kinds of selectors, and the benefit of also using a request's earlier lookups.

    python -m benchmarks.selector_kinds runs/benchmark/resnet56 --data runs/benchmark/known.npz

First table: hit rate at 97 / 99 % agreement on the certify split, averaged over the best variant of each
block, if every cache uses that kind. Second table: whole compositions whose later exits also use the classes
and confidences of earlier caches on the path (logistic regression, cross-fitted on the select split), against
the same exits without. Thresholds are refitted on select for the same risk and counted on certify.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from benchmarks.fresh import probabilities_of
from gati.caches import build_selector, fit_selector_networks, selector_names
from gati.caches.selectors import NETWORK, TEMPERATURE_SCALED, fit_temperature
from gati.composition.contests import Contest, contest_of
from gati.composition.instance import make_instance
from gati.composition.outcomes import SplitOutcomes
from gati.composition.plans import Settings
from gati.composition.risk import smoothed_loss
from gati.composition.search import search_frontier
from gati.exploration.library import CERTIFY, SELECT, Library
from gati.exploration.measure import hit_rate_at
from gati.types import Trial

AGREEMENTS = (0.97, 0.99)
TARGETS = (0.97, 0.985, 0.99, 0.995)
RISK_SHARE = 0.8  # share of the tolerated disagreements that roughly still certifies
FOLDS = 5


def main() -> int:
    """Print both tables as one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the --data of explore")
    arguments = parser.parse_args()
    library = Library.open(arguments.library)
    document = {
        "model": library.manifest.model_source,
        "chosen": {
            name: sum(trial.selector == name for trial in library.trials) for name in selector_names()
        },
        "kinds": kinds(library, arguments.data),
        "seeing_the_path": [row for target in TARGETS for row in path_rows(library, target)],
    }
    print(json.dumps(document, indent=1))
    return 0


def kinds(library: Library, data: Path) -> list[dict[str, Any]]:
    """Return hit rates on the certify split of each block's best variant, per kind of selector."""
    base = library.base_outcomes()
    select, certify = base.split == SELECT, base.split == CERTIFY
    best: dict[int, Trial] = {}
    for trial in sorted(library.trials, key=lambda trial: trial.hit_rate_at_99 or 0.0):
        if trial.status == "trained":
            best[trial.block_index] = trial
    found = probabilities_of(library, data, tuple(best.values()))
    rates: dict[str, list[list[float]]] = {name: [] for name in selector_names()}
    for probabilities in found.values():
        agrees = probabilities.argmax(1).numpy() == base.base_class
        for name in selector_names():
            score = scores(name, probabilities, base.base_class, select)[certify]
            rates[name].append([hit_rate_at(score, agrees[certify], level) for level in AGREEMENTS])
    means = {name: np.mean(rows, axis=0).round(4).tolist() for name, rows in rates.items()}
    return [{"selector": name, "at_97": mean[0], "at_99": mean[1]} for name, mean in means.items()]


def scores(
    name: str, probabilities: torch.Tensor, base_class: NDArray[np.int64], select: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return scores [n] of a selector fitted on the select split."""
    inside = torch.from_numpy(select)
    if name == NETWORK:
        agrees = torch.from_numpy(probabilities.argmax(1).numpy() == base_class)
        selector: Any = fit_selector_networks(probabilities[inside], agrees[inside], seed=0).network
    elif name == TEMPERATURE_SCALED:
        selector = fit_temperature(probabilities[inside], torch.from_numpy(base_class)[inside])
    else:
        selector = build_selector(name, probabilities.shape[1])
    with torch.no_grad():
        return np.asarray(selector(probabilities), dtype=np.float32)


def path_rows(library: Library, target: float) -> list[dict[str, Any]]:
    """Return expected gain and disagreements on the certify split, with and without the path."""
    select, certify = SplitOutcomes(library, SELECT), SplitOutcomes(library, CERTIFY)
    contest = contest_of(library, Settings(accuracy=target), "inline", select)
    risky = replace(contest.instance, loss=smoothed_loss(contest.instance))
    budget = RISK_SHARE * (1.0 - target) * len(select)
    exits = [trial for trial, _ in search_frontier(risky).within(budget, thorough=False)]
    rows = []
    for sees in ("nothing", "classes", "classes and scores"):
        counted = replayed(contest, exits, sees, budget, certify)
        rows.append({"accuracy_target": target, "exits": len(exits), "sees": sees, **counted})
    return rows


def replayed(
    contest: Contest, exits: Sequence[int], sees: str, budget: float, certify: SplitOutcomes
) -> dict[str, Any]:
    library, whole = certify.library, contest.instance
    select = SplitOutcomes(library, SELECT)
    ids = [contest.trials[trial].trial_id for trial in exits]
    known, new = [], []
    for position in range(len(ids)):
        right = select.trial(ids[position]).predicted == select.base_class
        ours, theirs = (features(split, ids[: position + 1], sees) for split in (select, certify))
        if ours.shape[1] == 1:
            known.append(ours[:, 0])
            new.append(theirs[:, 0])
            continue
        fold = np.random.default_rng(0).permutation(len(right)) % FOLDS
        held_out = np.zeros(len(right))
        for index in range(FOLDS):
            part = LogisticRegression(C=0.3).fit(ours[fold != index], right[fold != index])
            held_out[fold == index] = part.decision_function(ours[fold == index])
        known.append(held_out)
        new.append(LogisticRegression(C=0.3).fit(ours, right).decision_function(theirs))
    instance = make_instance(
        block=whole.block[exits].tolist(),
        score=np.array(known, dtype=np.float32),
        wrong=whole.wrong[exits],
        reach_ms=whole.reach_ms[exits].tolist(),
        lookup_ms=whole.lookup_ms[exits].tolist(),
        penalty_ms=whole.penalty_ms[exits].tolist(),
        memory_bytes=whole.memory_bytes[exits].tolist(),
        base_ms=whole.base_ms,
    )
    chosen = search_frontier(replace(instance, loss=smoothed_loss(instance))).within(budget)
    inside = np.ones(len(certify), dtype=bool)
    spent_ms = paid_ms = 0.0
    wrong = 0
    for position, cut in chosen:
        hit = inside & (new[position].astype(np.float32) >= np.float32(instance.threshold(position, cut)))
        wrong += int((certify.trial(ids[position]).predicted != certify.base_class)[hit].sum())
        spent_ms += hit.sum() * (instance.reach_ms[position] + instance.lookup_ms[position] + paid_ms)
        paid_ms += instance.penalty_ms[position]
        inside &= ~hit
    spent_ms += inside.sum() * (instance.base_ms + paid_ms)
    gain = whole.base_ms * len(certify) / float(spent_ms)
    return {"gain": round(gain, 3), "wrong": wrong, "n": len(certify)}


def features(split: SplitOutcomes, path: Sequence[Any], sees: str) -> NDArray[np.float64]:
    """Return the features of the last exit's selector: its own score, and features of earlier exits."""
    *earlier, last = (split.trial(trial_id) for trial_id in path)
    columns = [logit(last.score)]
    if earlier and sees == "classes":
        columns.append(np.mean([one.predicted == last.predicted for one in earlier], axis=0))
    elif earlier and sees == "classes and scores":
        for one in earlier:
            same, sure = one.predicted == last.predicted, logit(one.score)
            columns += [same * 1.0, np.where(same, sure, 0.0), np.where(same, 0.0, sure)]
    return np.stack(columns, axis=1)


def logit(score: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the logit of a probability, or the negative logarithm of a negative entropy."""
    if score.min() >= 0.0:
        share = np.clip(score.astype(np.float64), 1e-6, 1 - 1e-6)
        return np.log(share / (1.0 - share))
    return -np.log(np.maximum(-score.astype(np.float64), 1e-6))


if __name__ == "__main__":
    raise SystemExit(main())
