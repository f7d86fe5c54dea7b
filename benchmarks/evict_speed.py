"""Eviction speed: whole replays, and single decisions with tens of thousands of leaves.

    python -m benchmarks.evict_speed [--trace conversation] [--profile]

Prints blocks replayed per second for LRU and `gati` with its learned predictor, the cost that refits add to
requests, the time to score 10,000 candidates, and the 50th and 99th percentile of evicting 4 and 2,500 blocks
when every leaf is one block, in wall time and in CPU time, which other programs disturb less. All evict from
the same number of leaves: LRU, `gati` without a model, and `gati` with the trace's model. Between
measurements, as many blocks are loaded as were evicted. `--profile` adds a profile.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

import numpy as np

from benchmarks.evict_policies import load
from gati.evict import Trace, replay
from gati.evict.cache import BlockCache
from gati.evict.policy.registry import make_policy
from gati.evict.predict.hazard import HazardModel
from gati.evict.predict.named import predictor_named
from gati.evict.predict.reuse import Reuse

LEAVES = 41_000


def requests(trace: Trace, blocks: int) -> HazardModel:
    """Print CPU time of requests with and without fits; return the last model."""
    cache = BlockCache(make_policy("gati", blocks, predictor_named("reuse")))
    assert isinstance(cache.predictor, Reuse)
    work, fits = [], []
    for ids, at in zip(trace.requests, trace.time_s, strict=True):
        before, began = cache.predictor.figures()["refits"], time.thread_time()
        cache.access(ids, at)
        work.append(1e3 * (time.thread_time() - began))
        fits.append(cache.predictor.figures()["refits"] > before)
    took, fitted = np.array(work), np.array(fits)
    every, others = np.percentile(took, 99), np.percentile(took[~fitted], 99)
    print(
        f"requests: processor, p50 {np.median(took):.3f} ms, p99 {every:.3f} ms, {others:.3f} without "
        f"the {fitted.sum()} that fitted, which took {took[fitted].mean():.0f} ms each"
    )
    scoring = []
    for _ in range(200):
        began = time.thread_time()
        cache.predictor.scores(10_000)
        scoring.append(1e3 * (time.thread_time() - began))
    spread = np.percentile(scoring, [50, 99])
    print(f"scores of 10,000 candidates: p50 {spread[0]:.3f} ms, p99 {spread[1]:.3f} ms")
    assert cache.predictor.model is not None
    return cache.predictor.model


def decisions(
    name: str, count: int, repetitions: int, model: HazardModel | None = None
) -> tuple[list[float], list[float]]:
    """Return p50 and p99 in ms of evicting `count` of LEAVES one-block leaves: wall time, and CPU time."""

    def predictor(capacity: int, seed: int) -> Reuse:
        return Reuse(capacity, model=model, flat=True, fits=model is None, seed=seed)

    cache = BlockCache(make_policy(name, LEAVES, predictor, flat=True))
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
    model = requests(trace, 10_000)
    for name, known in (("lru", None), ("gati", None), ("gati", model)):
        for count, repetitions in ((4, 200), (2500, 20)):
            clock, work = decisions(name, count, repetitions, known)
            print(
                f"{name}{' with a model' if known else ''}: {count} of {LEAVES:,} leaves, "
                f"p50 {clock[0]:.3f} ms, p99 {clock[1]:.3f} ms, processor {work[0]:.3f} and {work[1]:.3f} ms",
                flush=True,
            )
    if given.profile:
        with cProfile.Profile() as profile:
            replay(trace, [10_000], ["gati"])
        pstats.Stats(profile).sort_stats("cumulative").print_stats(25)


if __name__ == "__main__":
    main()
