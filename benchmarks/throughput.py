"""Throughput with many concurrent clients: Gati against the plain network on the same engine.

    python -m benchmarks.throughput LIBRARY --data TEST.npz --composition NAME [NAME ...]

Each of `--clients` threads sends the next request as soon as it has an answer. Plain network and Gati
alternate, three seconds each, `--repetitions` times; ratios compare adjacent turns. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from gati.composition.load import open_served
from gati.evaluation.timing import BenchEntry, measure_throughput
from gati.model.data import load_data


def main() -> int:
    """Print one object per composition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--composition", nargs="+", default=["default"])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    json.dump([measure(name, arguments) for name in arguments.composition], sys.stdout, indent=1)
    print()
    return 0


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the throughput of one composition and of the plain network on its backend."""
    served = open_served(arguments.library, composition=name, threads=arguments.threads)
    data = load_data(str(arguments.data), served.engine.preprocessing, what="requests")
    images = data.images(range(len(data)))
    contenders = [BenchEntry(kind, served.engine, kind == "gati") for kind in ("base", "gati")]
    rates: dict[str, list[float]] = {"base": [], "gati": []}
    for _ in range(arguments.repetitions):
        for contender in contenders:
            rates[contender.name].append(
                measure_throughput(
                    contender,
                    lambda index: images[index : index + 1],
                    len(images),
                    arguments.clients,
                    arguments.seconds,
                )
            )
    for contender in contenders:
        contender.close()
    ratios = [gati / base for gati, base in zip(rates["gati"], rates["base"], strict=True)]
    return {
        "composition": name,
        "backend": served.engine.backend,
        "accuracy_target": served.composition.accuracy_target,
        "clients": arguments.clients,
        "answers_per_s": {kind: round(median(values), 1) for kind, values in rates.items()},
        "ratio": {"median": round(median(ratios), 3), "least": round(min(ratios), 3)},
    }


if __name__ == "__main__":
    raise SystemExit(main())
