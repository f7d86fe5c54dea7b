"""Compare inline with overlapped lookups on the CPU, for several shares of the cores.

    python -m benchmarks.overlapped LIBRARY --data TEST.npz [--composition NAME] [--cores 1 2]

The same exits with the same thresholds answer every request: inline, where the network waits for each lookup
(synchronous), and overlapped, where a worker with `--cores` cores of its own runs it and the network goes on
with the others (asynchronous); and the plain network on all cores. Without `--cores`, one core and half of
them. All take turns of 64 requests in one process, on backend `torch`, which runs segments one by one,
whatever backend the composition is for. Prints a markdown table: `mean` and `p99` are relative to the plain
network, the mean with the range over the repetitions; agreement is with the plain network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gati.composition.load import Served, open_served
from gati.cores import core_count
from gati.engine.cores import check_lookup_cores
from gati.errors import GatiError
from gati.evaluation.bench import float32_classes
from gati.evaluation.timing import BenchEntry, measure_latency
from gati.model.data import load_data
from gati.types import Placement


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row per way to run the lookups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--composition", default="default")
    parser.add_argument("--cores", type=int, nargs="+")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--limit", type=int, help="only the first inputs")
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args(arguments)
    try:
        served = open_served(
            asked.library, composition=asked.composition, device="cpu", threads=asked.threads
        )
        if not served.composition.exits:
            raise SystemExit(f"composition '{asked.composition}' has no exits, so there are no lookups")
        contenders = contenders_of(served, asked.cores or sorted({1, max(1, core_count() // 2)}))
        data = load_data(asked.data, served.model.preprocessing, what="requests")
    except GatiError as error:
        raise SystemExit(f"error: {error}") from None
    data = data.subset(range(min(len(data), asked.limit or len(data))))
    images = data.images(range(len(data)))
    found = measure_latency(contenders, lambda row: images[row : row + 1], len(images), asked.repetitions)
    if found.note:
        print(f"warning: {found.note}", file=sys.stderr)
    print("\n".join(table(contenders, float32_classes(served.module, data, served.model.traced.device))))
    return 0


def contenders_of(served: Served, shares: Sequence[int]) -> list[BenchEntry]:
    """The plain network, and the composition's exits inline and overlapped. Raises BackendError."""
    model, device = served.model, served.model.traced.device
    exits = model.exits(served.composition)

    def entry(name: str, placement: Placement, cores: int = 1) -> BenchEntry:
        placed = [replace(leaving, placement=placement) for leaving in exits]
        return BenchEntry(name, model.engine_of(placed, name, "torch", lookup_cores=cores), early=True)

    for cores in shares:
        check_lookup_cores(cores, device)
    base = BenchEntry("the plain network", model.engine_of([], "base", "torch"), early=False)
    overlapped = [
        entry(f"overlapped, {cores} of {core_count()} cores for lookups", "overlapped", cores)
        for cores in shares
    ]
    return [base, entry("inline", "inline"), *overlapped]


def table(contenders: Sequence[BenchEntry], reference: np.ndarray) -> list[str]:
    """The lines of a markdown table; the first contender is what the others are relative to."""
    base = contenders[0]
    lines = ["| lookups | mean | p99 | hits | agreement |", "|---|---|---|---|---|"]
    for each in contenders:
        pairs = zip(each.times_ms, base.times_ms, strict=True)
        ratios = [np.mean(own) / np.mean(other) for own, other in pairs]
        mean = np.mean(each.times_ms) / np.mean(base.times_ms)
        p99 = np.percentile(each.times_ms, 99) / np.percentile(base.times_ms, 99)
        agreement = np.mean(np.array(each.answers) == reference)
        lines.append(
            f"| {each.name} | {mean:.3f} ({min(ratios):.3f}-{max(ratios):.3f}) | {p99:.3f} "
            f"| {each.hits / len(each.answers):.1%} | {agreement:.2%} |"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
