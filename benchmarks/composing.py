"""Time the exact formulation on the largest problem it is meant for, and report its optimality gap.

    python -m benchmarks.composing

27 blocks, 8 variants, 3,000 select inputs, every threshold between two scores: far more than the 20 of the
published tables. Synthetic data: inputs have a hardness, deeper caches answer harder ones, scores are noisy.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from gati.composition.exact import solve_exact
from gati.composition.instance import Instance, make_instance
from gati.composition.search import search_frontier

TARGETS = (0.97, 0.985, 0.99, 0.995)


def main() -> int:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=27)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--inputs", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    rows = [row for seed in range(arguments.seeds) for row in measured(synthetic(arguments, seed), seed)]
    print(json.dumps({"size": vars(arguments), "rows": rows}, indent=1))
    return 0


def measured(instance: Instance, seed: int) -> list[dict[str, float]]:
    """Return time and gap per target; the first row's time includes the shared search."""
    rows = []
    began_s = time.monotonic()
    frontier = search_frontier(instance)
    for target in TARGETS:
        budget = int((1.0 - target) * instance.inputs)
        choice = solve_exact(instance, budget, frontier=frontier)
        rows.append(
            {
                "seed": seed,
                "accuracy_target": target,
                "seconds": round(time.monotonic() - began_s, 2),
                "gain": round(instance.base_ms / choice.outcome.mean_latency_ms, 3),
                "exits": len(choice.chosen),
                "gap": round(choice.gap or 0.0, 3),
            }
        )
        began_s = time.monotonic()
    return rows


def synthetic(arguments: argparse.Namespace, seed: int) -> Instance:
    random = np.random.default_rng(seed)
    hardness = random.uniform(size=arguments.inputs)
    trials = arguments.blocks * arguments.variants
    block = np.repeat(np.arange(arguments.blocks), arguments.variants)
    depth = (block + 1) / arguments.blocks
    skill = 0.5 + 0.5 * depth**0.5 + random.normal(0, 0.02, trials)
    margin = skill[:, None] - hardness + random.normal(0, 0.12, (trials, arguments.inputs))
    score = 1.0 / (1.0 + np.exp(-8.0 * (margin + random.normal(0, 0.1, margin.shape))))
    return make_instance(
        block=block.tolist(),
        score=score.astype(np.float32),
        wrong=margin < 0.0,
        reach_ms=(4.0 * depth).tolist(),
        lookup_ms=random.uniform(0.03, 0.15, trials).tolist(),
        penalty_ms=random.uniform(0.03, 0.15, trials).tolist(),
        memory_bytes=random.integers(10_000, 2_000_000, trials).tolist(),
        base_ms=4.2,
        slowdown_limit_ms=0.08 * 4.2,
    )


if __name__ == "__main__":
    raise SystemExit(main())
