"""Choose the share of held-out inputs to certify on: the gain of whole compositions for each share.

    python -m benchmarks.splitting [--library DIR [--backend openvino]] [--inputs 1000,2000] [--seeds 12]

With few select inputs, choices do not generalise and walks end early. With few certify inputs, hardly any
losses are allowed. Each draw takes `--inputs` random inputs of a population, splits them at each share (the
same draw for all shares), builds the path of settings on one part, walks it on the other, and replays the
resulting setting on the whole population. Prints one JSON document: for each number of inputs, target and
share, the mean gain over the base model and its standard error.

The population is a library's held-out inputs or, without a library, 30,000 synthetic inputs on which caches
behave as on a ResNet-56 (`synthetic`). Selectors are those of the population: the figures do not include that
fewer select inputs also fit poorer selectors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gati.composition.candidates import lookup_cost, reach_by_block
from gati.composition.contests import path_within
from gati.composition.costs import as_composed
from gati.composition.exact import ExactChoice
from gati.composition.instance import Instance, make_instance
from gati.composition.plans import Settings
from gati.composition.risk import smoothed_loss
from gati.composition.search import search_frontier
from gati.composition.walk import certify
from gati.exploration.library import Library

SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
TARGETS = (0.97, 0.98, 0.99)
STEPS = tuple(np.linspace(0.1, 1.4, 18))  # coarser than the composer's, equally for all shares
DELTA = 0.05
POPULATION = 30_000


@dataclass(frozen=True)
class Population:
    """m trials in forward order, N inputs."""

    block: NDArray[np.int64]  # [m]
    score: NDArray[np.float32]  # [m, N]
    wrong: NDArray[np.bool_]  # [m, N]
    reach_ms: NDArray[np.float64]  # [m]
    lookup_ms: NDArray[np.float64]  # [m]
    base_ms: float
    slowdown_limit_ms: float | None

    def instance(self, rows: NDArray[np.int64]) -> Instance:
        """Return the exact problem on a subset of the inputs."""
        return make_instance(
            block=self.block.tolist(),
            score=self.score[:, rows],
            wrong=self.wrong[:, rows],
            reach_ms=self.reach_ms.tolist(),
            lookup_ms=self.lookup_ms.tolist(),
            penalty_ms=self.lookup_ms.tolist(),
            memory_bytes=[0] * len(self.block),
            base_ms=self.base_ms,
            slowdown_limit_ms=self.slowdown_limit_ms,
        )

    def replay(
        self, setting: Sequence[tuple[int, float]], rows: NDArray[np.int64] | slice
    ) -> tuple[int, float]:
        """Return the losses and mean latency of `rows`; `setting` is a list of trials with thresholds."""
        score, wrong = self.score[:, rows], self.wrong[:, rows]
        inside = np.ones(score.shape[1], dtype=bool)
        losses, spent_ms, paid_ms = 0, 0.0, 0.0
        for trial, threshold in setting:
            leaving = inside & (score[trial] >= np.float32(threshold))
            losses += int(wrong[trial, leaving].sum())
            spent_ms += leaving.sum() * float(self.reach_ms[trial] + self.lookup_ms[trial] + paid_ms)
            paid_ms += float(self.lookup_ms[trial])
            inside &= ~leaving
        spent_ms += inside.sum() * (self.base_ms + paid_ms)
        return losses, spent_ms / score.shape[1]


def main() -> int:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--backend", default="openvino")
    parser.add_argument("--inputs", default="500,1000,2000")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--seeds", type=int, default=12)
    arguments = parser.parse_args()
    given = arguments.library
    population = synthetic(0) if given is None else of_library(given, arguments.backend)
    shares = [float(share) for share in arguments.shares.split(",")]
    rows = [
        row
        for count in map(int, arguments.inputs.split(","))
        for row in measured(population, count, shares, arguments.seeds)
    ]
    inputs = population.score.shape[1]
    print(json.dumps({"population": inputs, "seeds": arguments.seeds, "rows": rows}, indent=1))
    return 0


def measured(
    population: Population, count: int, shares: Sequence[float], seeds: int
) -> list[dict[str, float]]:
    """Return a row per target and share: mean gain, its standard error, and how often no setting passed."""
    gains = np.ones((len(TARGETS), len(shares), seeds))
    for seed in range(seeds):
        order = np.random.default_rng((seed, count)).permutation(population.score.shape[1])[:count]
        for at, share in enumerate(shares):
            cut = count - round(share * count)
            instance = population.instance(np.sort(order[:cut]))
            frontier = search_frontier(replace(instance, loss=smoothed_loss(instance)))
            for target_at, target in enumerate(TARGETS):
                path = path_within(instance, (1.0 - target) * cut, STEPS, frontier=frontier)
                gains[target_at, at, seed] = gain_of(population, instance, path, order[cut:], target)
    best = gains.mean(axis=2).argmax(axis=1)
    # paired comparison with the best share: the draws are the same
    behind = np.stack([gains[each, best[each]] - gains[each] for each in range(len(TARGETS))])
    return [
        {
            "inputs": count,
            "accuracy_target": target,
            "certify_share": share,
            "gain": round(float(gains[target_at, at].mean()), 4),
            "behind": round(float(behind[target_at, at].mean()), 4),
            "standard_error": round(float(behind[target_at, at].std() / max(1, seeds - 1) ** 0.5), 4),
            "without_caches": round(float((gains[target_at, at] == 1.0).mean()), 3),
        }
        for target_at, target in enumerate(TARGETS)
        for at, share in enumerate(shares)
    ]


def gain_of(
    population: Population,
    instance: Instance,
    path: Sequence[ExactChoice],
    certify_rows: NDArray[np.int64],
    target: float,
) -> float:
    """Walk the path on `certify_rows`, and return the gain on the whole population."""
    settings = [[(trial, instance.threshold(trial, cut)) for trial, cut in choice.chosen] for choice in path]
    if not settings:
        return 1.0
    counted = ((population.replay(each, certify_rows)[0], len(certify_rows)) for each in settings)
    deployed = certify(counted, target, DELTA, settings=len(settings)).deployed
    if deployed is None:
        return 1.0
    return population.base_ms / population.replay(settings[deployed], slice(None))[1]


def of_library(directory: Path, backend: str) -> Population:
    """Return a library's held-out inputs, both splits, with the latencies of a backend."""
    library = as_composed(Library.open(directory), backend)
    base, profile = library.base_outcomes(), library.manifest.profile
    reach_ms = reach_by_block(library.manifest.blocks)
    trials = [
        (trial, cost)
        for trial in sorted(library.trials, key=lambda trial: (trial.block_index, trial.trial_id))
        if trial.status == "trained" and (cost := lookup_cost(trial, "inline")) is not None
    ]
    outcomes = [library.outcomes(trial.trial_id) for trial, _ in trials]
    return Population(
        block=np.array([trial.block_index for trial, _ in trials]),
        score=np.array([each.score for each in outcomes]),
        wrong=np.array([each.predicted != base.base_class for each in outcomes]),
        reach_ms=np.array([reach_ms[trial.block_index] for trial, _ in trials]),
        lookup_ms=np.array([cost.lookup_ms for _, cost in trials]),
        base_ms=profile.base_ms,
        slowdown_limit_ms=Settings().slowdown_limit_ms(profile),
    )


def synthetic(seed: int, blocks: int = 8, variants: int = 2) -> Population:
    """Return inputs of varying hardness; deeper caches answer harder ones, and scores are noisy."""
    random = np.random.default_rng(seed)
    hardness = random.beta(1.0, 2.2, POPULATION)
    trials = blocks * variants
    block = np.repeat(np.arange(blocks), variants)
    depth = (block + 1) / (blocks + 1)
    skill = 0.3 + 0.4 * depth**0.7 + random.normal(0, 0.01, trials)
    common = random.normal(0, 0.08, POPULATION)
    margin = skill[:, None] - hardness + common + random.normal(0, 0.06, (trials, POPULATION))
    score = margin + random.normal(0, 0.1, margin.shape)
    return Population(
        block=block,
        score=score.astype(np.float32),
        wrong=margin < 0.0,
        reach_ms=depth,
        lookup_ms=random.uniform(0.01, 0.06, trials),
        base_ms=1.0,
        slowdown_limit_ms=0.15,
    )


if __name__ == "__main__":
    raise SystemExit(main())
