"""Latency of pooled sums of embedding rows with most rows in Redis: `gati` against LRU, in one run.

    python -m benchmarks.evict_embedding [--trace zipf,games] [--share 0.01,0.02,0.03]
        [--batches 120] [--seeds 2] [--skew 1.05] [--rows 200000] [--threads 1]

Starts a redis-server on the loopback interface and fills it with rows of 128 floats. A batch is 512 sums.
`zipf` draws 50 ids per sum from `--rows` rows with exponent `--skew`. `games` sums a user's last items, up to
50, after every event in the Amazon data, with users interleaved at random. Each batch goes to all caches in
changing order, so that other work on the machine affects all equally; the first third, while caches fill, is
not counted. `lru+` is LRU that spends the predictor's memory on more rows.

Prints mean latency, its ratio to LRU's with a 95 % interval (bootstrap over blocks of ten batches), the same
ratio for the CPU time of cache and server together, which other programs disturb less, throughput, and hit
rates: of all ids, and of the distinct ids of a batch, each of which is fetched once.
"""

from __future__ import annotations

import argparse
import gzip
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import redis
import torch
from numpy.typing import NDArray

from gati.evict.embed.cache import EmbeddingCache
from gati.evict.embed.redis_tier import RedisTier

GAMES = Path(__file__).resolve().parents[2] / "shared/data/recsys/amazon_video_games_sasrec.txt.gz"
WIDTH, POOLING, SUMS = 128, 50, 512
NAMES = ("lru", "lru+", "gati")
Bags = tuple[torch.Tensor, torch.Tensor]


def zipf(rows: int, skew: float, seed: int) -> Iterator[Bags]:
    """Batches of ids drawn independently; popular ids lie anywhere in the table."""
    source = np.random.default_rng(seed)
    chances = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -skew)
    ids = source.permutation(rows)
    offsets = torch.arange(0, SUMS * POOLING, POOLING)
    while True:
        drawn = np.searchsorted(chances, source.random(SUMS * POOLING) * chances[-1])
        yield torch.from_numpy(ids[drawn]), offsets


def games(seed: int) -> Iterator[Bags]:
    """Yield each user's latest items after every event, with users interleaved at random."""
    users: dict[str, list[int]] = {}
    with gzip.open(GAMES, "rt") as file:
        for line in file:
            user, item = line.split()
            users.setdefault(user, []).append(int(item) - 1)
    turns = [user for user, items in users.items() for _ in items]
    random.Random(seed).shuffle(turns)
    events: dict[str, int] = dict.fromkeys(users, 0)
    bags: list[list[int]] = []
    for user in turns:
        events[user] += 1
        bags.append(users[user][max(events[user] - POOLING, 0) : events[user]])
        if len(bags) == SUMS:
            ends = np.cumsum([len(bag) for bag in bags])
            yield (
                torch.tensor([id_ for bag in bags for id_ in bag]),
                torch.from_numpy(np.append(0, ends[:-1])),
            )
            bags = []


def games_rows() -> int:
    with gzip.open(GAMES, "rt") as file:
        return max(int(line.split()[1]) for line in file)


@contextmanager
def redis_server() -> Iterator[str]:
    """Start a server on the loopback interface; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", folder]
        process = subprocess.Popen(["redis-server", *options], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if not any("ready to accept" in line.lower() for line in process.stdout):
            raise SystemExit("redis-server did not start")
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.communicate()


def run(
    slow: RedisTier, batches: list[Bags], rows: int, seed: int, server: Any
) -> tuple[NDArray[np.float64], dict[str, tuple[float, float]]]:
    """Return wall and CPU seconds per counted batch, [2, batches, caches], and the two hit rates."""
    caches = {
        name: EmbeddingCache(slow, rows, mode="sum", policy=name, seed=seed) for name in ("lru", "gati")
    }
    more = caches["gati"].figures()["predictor_bytes"] // (WIDTH * 4)
    caches["lru+"] = EmbeddingCache(slow, rows + more, mode="sum", policy="lru")
    took = np.zeros((2, len(batches), len(NAMES)))
    warm = len(batches) // 3
    before: dict[str, dict[str, int]] = {}
    for number, (ids, offsets) in enumerate(batches):
        if number == warm:
            before = {name: dict(cache.figures()) for name, cache in caches.items()}
        answers = []
        for at in np.roll(np.arange(len(NAMES)), number):
            worked = used_s(server)
            began = time.perf_counter()
            answers.append(caches[NAMES[at]](ids, offsets))
            took[0, number, at] = time.perf_counter() - began
            took[1, number, at] = used_s(server) - worked
        assert all(torch.equal(answer, answers[0]) for answer in answers)
    rates = {}
    for name, cache in caches.items():
        now = cache.figures()
        part = {key: now[key] - before[name][key] for key in ("hits", "requested", "fetched", "distinct")}
        rates[name] = (part["hits"] / part["requested"], 1.0 - part["fetched"] / part["distinct"])
    return took[:, warm:], rates


def used_s(server: Any) -> float:
    """Return the CPU time of this process and the server so far."""
    info = server.info("cpu")
    return time.process_time() + float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def ratio(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the ratio of mean latencies and its 95 % interval, by bootstrap over blocks of ten batches."""
    blocks = [np.arange(at, min(at + 10, len(ours))) for at in range(0, len(ours), 10)]
    source = np.random.default_rng(0)
    drawn = []
    for _ in range(2_000):
        chosen = np.concatenate([blocks[at] for at in source.integers(0, len(blocks), len(blocks))])
        drawn.append(ours[chosen].mean() / theirs[chosen].mean())
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(ours.mean() / theirs.mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default="zipf,games")
    parser.add_argument("--share", default="0.01,0.02,0.03")
    parser.add_argument("--skew", type=float, default=1.05)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of torch; those that wait take Redis's core")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with redis_server() as url:
        server = redis.Redis.from_url(url)
        for trace in given.trace.split(","):
            total = given.rows if trace == "zipf" else games_rows()
            weight = torch.randn(total, WIDTH, generator=torch.Generator().manual_seed(0))
            slow = RedisTier.write(url, trace, weight)
            for share in map(float, given.share.split(",")):
                runs = []
                for seed in range(given.seeds):
                    source = zipf(total, given.skew, seed) if trace == "zipf" else games(seed)
                    runs.append(
                        run(slow, list(islice(source, given.batches)), int(share * total), seed, server)
                    )
                took, work = np.concatenate([seconds for seconds, _ in runs], axis=1)
                for at, name in enumerate(NAMES):
                    hits, distinct = np.mean([rates[name] for _, rates in runs], axis=0)
                    relative, low, high = ratio(took[:, at], took[:, 0])
                    print(
                        f"{trace} {share:.0%} {name:4}: mean {1e3 * took[:, at].mean():6.1f} ms "
                        f"of lru {relative:.3f} [{low:.3f}, {high:.3f}], "
                        f"processor {ratio(work[:, at], work[:, 0])[0]:.3f}, "
                        f"{SUMS / took[:, at].mean():7,.0f} sums/s, "
                        f"hits {hits:.3f}, of different ids {distinct:.3f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
