"""Compare Gati and the plain network on every engine, in turns in one process.

    python -m benchmarks.engines LIBRARY --data TEST.npz --composition NAME [NAME ...]

First make one composition per engine (`gati compose LIBRARY --backend openvino --name openvino-0.97`). All
contenders take turns of 64 requests. `gain` is over the plain network on the same engine, `gain_fastest`
over the fastest plain network of any precision that keeps the target, or agrees as often as the
composition does here. Agreement is with the float32 network. `oracle` is the gain if every input exits at
its earliest correct lookup and lookups are free. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gati.composition.costs import as_composed
from gati.composition.load import Served, open_served
from gati.evaluation.bench import float32_classes
from gati.evaluation.timing import BenchEntry, measure_latency
from gati.exploration.library import CERTIFY, Library
from gati.model.data import load_data
from gati.variants import ITSELF


def main() -> int:
    """Print one object per contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--composition", nargs="+", required=True)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    served = [
        open_served(arguments.library, composition=name, threads=arguments.threads)
        for name in arguments.composition
    ]
    contenders: dict[str, BenchEntry] = {}
    for name, each in zip(arguments.composition, served, strict=True):
        contenders.setdefault(each.engine.backend, BenchEntry(each.engine.backend, each.engine, early=False))
        contenders[name] = BenchEntry(name, each.engine, early=True)
    data = load_data(str(arguments.data), served[0].model.preprocessing, what="requests")
    images = data.images(range(len(data)))
    measure_latency(
        list(contenders.values()), lambda index: images[index : index + 1], len(images), arguments.repetitions
    )
    reference = float32_classes(served[0].module, data, served[0].engine.traced.device)
    json.dump(table(contenders, served, reference), sys.stdout, indent=1)
    print()
    return 0


def table(contenders: dict[str, BenchEntry], served: list[Served], reference: Any) -> list[dict[str, Any]]:
    """Return the rows of the plain networks and the compositions."""
    means = {name: np.array([np.mean(times) for times in each.times_ms]) for name, each in contenders.items()}
    agreement = {
        name: float(np.mean(np.array(each.answers) == reference)) for name, each in contenders.items()
    }
    static = sorted(
        (name for name, each in contenders.items() if not each.early), key=lambda name: means[name].mean()
    )
    early = [name for name, each in contenders.items() if each.early]
    tails = {name: tail_ms(each) for name, each in contenders.items()}
    rows = []
    for name, each in contenders.items():
        backend = each.engine.backend
        composition = next((one.composition for one in served if one.engine is each.engine), None)
        target = None if composition is None else composition.accuracy_target
        # A network alone that agrees less often than the target, and than the composition, is no alternative.
        own = [agreement[other] for other in early if contenders[other].engine is each.engine]
        least = min(target or 0.0, *own)
        fastest = next((plain for plain in static if agreement[plain] >= least), static[0])
        rows.append(
            {
                "name": name,
                "early": each.early,
                "mean_ms": round(float(means[name].mean()), 4),
                "gain": spread(means[backend] / means[name]),
                "gain_fastest": spread(means[fastest] / means[name]),
                "fastest": fastest,
                "tail_ratio": round(tails[name] / tails[backend], 3),
                "agreement": round(agreement[name], 4),
                "hit_rate": round(each.hits / len(each.answers), 4),
                "accuracy_target": target,
                "oracle": oracle(served[0].library, backend) if each.early else None,
            }
        )
    return rows


def tail_ms(contender: BenchEntry) -> float:
    """Return the 99th percentile over all repetitions."""
    return float(np.percentile(np.concatenate([np.array(times) for times in contender.times_ms]), 99))


def spread(values: Any) -> str:
    """Format the mean, minimum and maximum over repetitions."""
    return f"{values.mean():.2f} ({values.min():.2f}-{values.max():.2f})"


def oracle(library: Library, backend: str) -> float:
    """Return the gain if each input exits at its first correct lookup and lookups are free."""
    costed = as_composed(library, backend)
    base = library.base_outcomes()
    rows = base.split == CERTIFY
    profile = costed.manifest.profile
    reach = {block.index: block.reach_ms for block in profile.blocks}
    spent = np.full(int(rows.sum()), profile.base_ms)
    for trial in costed.trials:
        if trial.status == "trained" and trial.variant != ITSELF:  # which is always right in float32
            right = library.outcomes(trial.trial_id).predicted[rows] == base.base_class[rows]
            spent = np.where(right, np.minimum(spent, reach[trial.block_index]), spent)
    return round(float(profile.base_ms / spent.mean()), 2)


if __name__ == "__main__":
    raise SystemExit(main())
