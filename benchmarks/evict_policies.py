"""Hit rates of eviction policies on real LLM serving traces, over several seeds.

    python -m benchmarks.evict_policies [--trace conversation] [--size 1000,2000,5000,10000,20000] [--seeds 5]
    python -m benchmarks.evict_policies --noise --size 5000
    python -m benchmarks.evict_policies --noise --trace games --limit 5000 --size 300
    python -m benchmarks.evict_policies --noise --policy gati --size 1000,2000,5000,10000,20000,40000
    python -m benchmarks.evict_policies --trace games --limit 20000 --size 300,1000
    python -m benchmarks.evict_policies --ablate --size 2000,5000,10000,20000 --seeds 3

Prints a table: mean hit rate with a 95 % interval over the seeds (Student's t), the same without blocks that
at least half of all requests share, hits relative to LRU, and the worst seed's margin over LRU.
`conversation` and `synthetic` are Mooncake's traces; `games` are the items of Amazon users, interleaved at
random for each seed. With `--noise`, predictions are the truth, inverted with probability 0 to 1: one
column each.

`--ablate` replays `gati` with what `reuse` learns, hazards over ages, and next to it with a simpler target:
whether a block is requested again within the mean time that blocks stay in an LRU cache of that size.

The settings of `reuse` were tuned on the first quarter of `conversation`; the other quarters are also shown.
"""

from __future__ import annotations

import argparse
import gzip
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy import stats

from gati.evict import Trace, make_trace, read_trace, replay
from gati.evict.cache import BlockCache
from gati.evict.policy.registry import make_policy
from gati.evict.predict.hazard import HazardModel, fit_hazards
from gati.evict.predict.named import predictor_named
from gati.evict.predict.reuse import Reuse, ReuseSettings
from gati.evict.predict.samples import Labels
from gati.evict.replays.result import PolicyOutcome

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
    """Return all users' items in order, with users interleaved at random."""
    users: dict[str, list[str]] = {}
    with gzip.open(GAMES, "rt") as file:
        for line in file:
            user, item = line.split()
            users.setdefault(user, []).append(item)
    turns = [user for user, items in users.items() for _ in items]
    random.Random(seed).shuffle(turns)
    left = {user: iter(items) for user, items in users.items()}
    return make_trace([[next(left[user])] for user in turns], kind="flat", name=GAMES.name)


def load(name: str, limit: int | None, seed: int = 0) -> Trace:
    if name == "games":
        trace = games(seed)
        return trace if limit is None else trace.head(limit)
    return read_trace(TRACES.get(name, Path(name)), limit=limit)


class Seeds:
    """Replays of one trace, or of one trace per seed."""

    def __init__(self, name: str, limit: int | None, seeds: int) -> None:
        count = seeds if name == "games" else 1
        self.traces = [load(name, limit, seed) for seed in range(count)]
        self.seeds = [[seed] for seed in range(seeds)] if count > 1 else [list(range(seeds))]

    def outcomes(self, size: int, policies: Sequence[str], predictor: str) -> list[PolicyOutcome]:
        """Return the outcomes of all seeds; `policies` includes LRU."""
        return [
            each
            for trace, seeds in zip(self.traces, self.seeds, strict=True)
            for each in replay(trace, [size], policies, predictor=predictor, seeds=seeds).outcomes
        ]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    mean = float(np.mean(values))
    if len(values) < 2 or np.ptp(values) == 0.0:
        return mean, 0.0
    error = float(stats.sem(values))
    return mean, error * float(stats.t.ppf(0.975, len(values) - 1))


def rates(outcomes: Sequence[PolicyOutcome], policy: str) -> list[float]:
    return [each.hit_rate for each in outcomes if each.policy == policy]


def least(outcomes: Sequence[PolicyOutcome], policy: str) -> float:
    """Return the worst seed's margin over LRU in points; LRU has one hit rate, or one per seed."""
    lru, mine = rates(outcomes, "lru"), rates(outcomes, policy)
    pairs = zip(mine, lru if len(lru) == len(mine) else lru[:1] * len(mine), strict=True)
    return min(100.0 * (rate - base) for rate, base in pairs)


def shown(values: Sequence[float]) -> str:
    """Format in %, with the interval if there is one."""
    rate, wide = interval(values)
    return f"{100.0 * rate:.2f}" + (f" ± {100.0 * wide:.2f}" if wide else "")


def title(replays: Seeds, text: str) -> str:
    trace = replays.traces[0]
    return f"\n{trace.name}: {len(trace):,} requests, {len(trace.blocks):,} blocks; {text}\n"


def compare(replays: Seeds, sizes: Sequence[int], policies: Sequence[str], predictor: str) -> None:
    print(title(replays, f"predictor {predictor}, %"))
    print("| blocks | policy | hit rate | beyond shared | hits / LRU's | least above LRU, points |")
    print("|---|---|---|---|---|---|")
    for size in sizes:
        outcomes = replays.outcomes(size, policies, predictor)
        lru, _ = interval(rates(outcomes, "lru"))
        for name in policies:
            rate, _ = interval(rates(outcomes, name))
            beyond = shown([each.hit_rate_beyond_shared for each in outcomes if each.policy == name])
            print(
                f"| {size:,} | {name} | {shown(rates(outcomes, name))} | {beyond} | {rate / lru:.2f} | "
                f"{least(outcomes, name):+.2f} |",
                flush=True,
            )


def noise(replays: Seeds, sizes: Sequence[int], policies: Sequence[str]) -> None:
    """Print a row per size and policy, a column per share of inverted predictions."""
    print(title(replays, "hit rates by share inverted, %; in brackets the smallest margin over LRU, points"))
    print(f"| blocks | policy | {' | '.join(f'{share:g}' for share in SHARES)} |")
    print(f"|---|---|{'---|' * len(SHARES)}")
    for size in sizes:
        columns = [
            replays.outcomes(
                size, ["lru", *policies] if "lru" not in policies else policies, f"noise:{share:g}"
            )
            for share in SHARES
        ]
        for name in policies:
            cells = [f"{shown(rates(each, name))} ({least(each, name):+.2f})" for each in columns]
            print(f"| {size:,} | {name} | {' | '.join(cells)} |", flush=True)


def quarters(trace: Trace, sizes: Sequence[int], seeds: int) -> None:
    """Print LRU and gati per quarter of the requests; settings were tuned on the first."""
    print("\n| blocks | policy | first quarter (tuned on) | second | third | fourth |")
    print("|---|---|---|---|---|---|")
    maker = predictor_named("reuse", flat=trace.kind == "flat")
    for size in sizes:
        for name in ("lru", "gati"):
            found = []
            for seed in range(seeds if name == "gati" else 1):
                policy = make_policy(name, size, maker, flat=trace.kind == "flat", seed=seed)
                cache = BlockCache(policy)
                hits = np.array(
                    [cache.access(ids, at).hits for ids, at in zip(trace.requests, trace.time_s, strict=True)]
                )
                parts = zip(np.array_split(hits, 4), np.array_split(trace.lengths, 4), strict=True)
                found.append([part.sum() / asked.sum() for part, asked in parts])
            print(
                f"| {size:,} | {name} | {' | '.join(f'{rate:.4f}' for rate in np.mean(found, axis=0))} |",
                flush=True,
            )


@dataclass(frozen=True)
class WithinResidence(ReuseSettings):
    """Learns only whether blocks are requested again within so many seconds."""

    residence_s: float = 60.0

    def fit(self, labels: Labels, seed: int) -> HazardModel | None:
        return fit_hazards(labels, edges=np.array([0.0, self.residence_s]), seed=seed)


def _reuse(settings: ReuseSettings, blocks: int, seed: int) -> Reuse:
    return Reuse(blocks, settings=settings, seed=seed)


def ablate(trace: Trace, sizes: Sequence[int], seeds: int) -> None:
    """`gati` with either target."""
    print("\n| blocks | LRU | hazards over ages | used again within the mean residence |\n|---|---|---|---|")
    total, span_s = len(trace.blocks), float(trace.time_s[-1] - trace.time_s[0])
    for size in sizes:
        lru = replay(trace, [size], ["lru"]).outcomes[0].hit_rate
        residence_s = size * span_s / ((1.0 - lru) * total)
        columns = []
        for settings in (ReuseSettings(), WithinResidence(residence_s=residence_s)):
            rates = []
            for seed in range(seeds):
                cache = BlockCache(make_policy("gati", size, partial(_reuse, settings), seed=seed))
                served = [
                    cache.access(ids, at).hits for ids, at in zip(trace.requests, trace.time_s, strict=True)
                ]
                rates.append(sum(served) / total)
            columns.append(shown(rates))
        print(
            f"| {size:,} | {100 * lru:.2f} | {columns[0]} | {columns[1]} ({residence_s:.0f} s) |", flush=True
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
    parser.add_argument("--ablate", action="store_true")
    given = parser.parse_args()
    replays = Seeds(given.trace, given.limit, given.seeds)
    trace = replays.traces[0]
    sizes = [int(size) for size in given.size.split(",")]
    if given.quarters:
        quarters(trace, sizes, given.seeds)
    elif given.ablate:
        ablate(trace, sizes, given.seeds)
    elif given.noise:
        names = given.policy or (
            f"{NOISY},predictive-marker,lmarker,guard" if trace.kind == "flat" else NOISY
        )
        noise(replays, sizes, names.split(","))
    else:
        names = given.policy or (FLAT if trace.kind == "flat" else PEERS)
        compare(replays, sizes, names.split(","), given.predictor)


if __name__ == "__main__":
    main()
