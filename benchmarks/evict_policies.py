"""What eviction policies hit on real traces of LLM serving, side by side, over seeds.

    python -m benchmarks.evict_policies [--trace conversation] [--size 1000,2000,5000,10000,20000] [--seeds 5]
    python -m benchmarks.evict_policies --noise [--size 5000]
    python -m benchmarks.evict_policies --trace games --limit 100000

Prints a table: mean hit rate with a 95 % interval over the seeds (Student's t), the same without what half of
all requests share, and hits over those of LRU. `conversation` and `synthetic` are Mooncake's traces, `games`
the items of Amazon's users, taken turns at random, one a request. With `--noise`, predictions are the truth
turned round with probability 0 to 1.

The settings of `reuse` were tuned on the first quarter of `conversation`; the other quarters are also shown.
"""

from __future__ import annotations

import argparse
import gzip
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from gati.evict import Trace, make_trace, read_trace, replay
from gati.evict.predict.named import predictor_named
from gati.evict.replays.replay import build

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = {
    name: DATA / "llm_traces" / f"mooncake_{name}_trace.jsonl.gz" for name in ("conversation", "synthetic")
}
GAMES = DATA / "recsys" / "amazon_video_games_sasrec.txt.gz"
PEERS = "lru,fifo,lfu,slru,tlru,hf,fpb,blindoracle+lru,laru,gati,opt-leaf,opt"
FLAT = f"{PEERS},predictive-marker,lmarker,guard"
NOISY = "lru,laru,gati,fpb,hf"
SHARES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


def games(seed: int = 0) -> Trace:
    """Every user's items in their order, users interleaved at random: each draw takes the next of one."""
    users: dict[str, list[str]] = {}
    with gzip.open(GAMES, "rt") as file:
        for line in file:
            user, item = line.split()
            users.setdefault(user, []).append(item)
    turns = [user for user, items in users.items() for _ in items]
    random.Random(seed).shuffle(turns)
    left = {user: iter(items) for user, items in users.items()}
    return make_trace([[next(left[user])] for user in turns], kind="flat", name=GAMES.name)


def load(name: str, limit: int | None) -> Trace:
    if name == "games":
        trace = games()
        return trace if limit is None else trace.head(limit)
    return read_trace(TRACES.get(name, Path(name)), limit=limit)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    mean = float(np.mean(values))
    if len(values) < 2 or np.ptp(values) == 0.0:
        return mean, 0.0
    error = float(stats.sem(values))
    return mean, error * float(stats.t.ppf(0.975, len(values) - 1))


def compare(trace: Trace, sizes: Sequence[int], policies: Sequence[str], predictor: str, seeds: int) -> None:
    print(f"\n{trace.name}: {len(trace):,} requests, {len(trace.blocks):,} blocks; predictor {predictor}\n")
    print("| blocks | policy | hit rate | beyond shared | hits / LRU's |")
    print("|---|---|---|---|---|")
    for size in sizes:
        result = replay(trace, [size], policies, predictor=predictor, seeds=range(seeds))
        lru = result.of("lru", size).hit_rate
        for name in policies:
            mine = [each for each in result.outcomes if each.policy == name]
            rate, wide = interval([each.hit_rate for each in mine])
            beyond, _ = interval([each.hit_rate_beyond_shared for each in mine])
            shown = f"{rate:.4f}" + (f" ± {wide:.4f}" if wide else "")
            print(f"| {size:,} | {name} | {shown} | {beyond:.4f} | {rate / lru:.2f} |", flush=True)


def quarters(trace: Trace, sizes: Sequence[int], seeds: int) -> None:
    """LRU and gati by quarters of the requests, of which the first was tuned on."""
    print("\n| blocks | policy | first quarter (tuned on) | second | third | fourth |")
    print("|---|---|---|---|---|---|")
    maker = predictor_named("reuse", flat=trace.kind == "flat")
    for size in sizes:
        for name in ("lru", "gati"):
            rates = []
            for seed in range(seeds if name == "gati" else 1):
                cache = build(name, size, maker, flat=trace.kind == "flat", seed=seed)
                hits = np.array(
                    [cache.access(ids, at).hits for ids, at in zip(trace.requests, trace.time_s, strict=True)]
                )
                parts = zip(np.array_split(hits, 4), np.array_split(trace.lengths, 4), strict=True)
                rates.append([part.sum() / asked.sum() for part, asked in parts])
            print(
                f"| {size:,} | {name} | {' | '.join(f'{rate:.4f}' for rate in np.mean(rates, axis=0))} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default="conversation", help="conversation, synthetic, games, or a file")
    parser.add_argument("--size", default="1000,2000,5000,10000,20000")
    parser.add_argument("--policy", default=None)
    parser.add_argument("--predictor", default="reuse")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--quarters", action="store_true")
    given = parser.parse_args()
    trace = load(given.trace, given.limit)
    sizes = [int(size) for size in given.size.split(",")]
    if given.quarters:
        quarters(trace, sizes, given.seeds)
    elif given.noise:
        names = given.policy or (
            f"{NOISY},predictive-marker,lmarker,guard" if trace.kind == "flat" else NOISY
        )
        for share in SHARES:
            compare(trace, sizes, names.split(","), f"noise:{share:g}", given.seeds)
    else:
        names = given.policy or (FLAT if trace.kind == "flat" else PEERS)
        compare(trace, sizes, names.split(","), given.predictor, given.seeds)


if __name__ == "__main__":
    main()
