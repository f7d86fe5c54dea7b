"""How long eviction takes: whole replays, and single decisions with tens of thousands of leaves.

    python -m benchmarks.evict_speed [--trace conversation] [--profile]

Prints blocks replayed a second for LRU and `gati` with its learned predictor, and the 50th and 99th
percentile of evicting 4 and 2,500 blocks where every leaf is one block, by the clock and in processor time,
which other programs disturb less. Both evict from the same number of
leaves: as many blocks as were evicted are loaded between the measurements. `--profile` adds where the time of
`gati` goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

import numpy as np

from benchmarks.evict_policies import load
from gati.evict import replay
from gati.evict.predict.named import predictor_named
from gati.evict.replays.replay import build

LEAVES = 41_000


def decisions(name: str, count: int, repetitions: int) -> tuple[list[float], list[float]]:
    """p50 and p99 in ms of evicting `count` of LEAVES leaves of one block: by the clock, and CPU time."""
    cache = build(name, LEAVES, predictor_named("reuse", flat=True), flat=True)
    for block in range(LEAVES):
        cache.access([block], 0.01 * block)
    took, work = [], []
    fresh = LEAVES
    for _ in range(repetitions):
        began, worked = time.perf_counter(), time.thread_time()
        cache.policy.evict(count, list(range(fresh, fresh + count)))
        work.append(1e3 * (time.thread_time() - worked))
        took.append(1e3 * (time.perf_counter() - began))
        for block in range(fresh, fresh + count):
            cache.access([block], 0.01 * block)
        fresh += count
    return np.percentile(took, [50, 99]).tolist(), np.percentile(work, [50, 99]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default="conversation")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    trace = load(given.trace, None)
    for name in ("lru", "gati"):
        outcome = replay(trace, [10_000], [name]).outcomes[0]
        print(f"{name}: {outcome.blocks_per_s:,.0f} blocks/s; evicting {outcome.decision_us}")
    for name in ("lru", "gati"):
        for count, repetitions in ((4, 200), (2500, 40)):
            clock, work = decisions(name, count, repetitions)
            print(
                f"{name}: {count} of {LEAVES:,} leaves, p50 {clock[0]:.3f} ms, p99 {clock[1]:.3f} ms, "
                f"processor {work[0]:.3f} and {work[1]:.3f} ms",
                flush=True,
            )
    if given.profile:
        with cProfile.Profile() as profile:
            replay(trace, [10_000], ["gati"])
        pstats.Stats(profile).sort_stats("cumulative").print_stats(25)


if __name__ == "__main__":
    main()
