"""Compare libcachesim's policies with Gati's on the same traces.

    pip install --target DIR libcachesim==0.3.5
    python -m benchmarks.evict_peers --packages DIR [--trace conversation] [--size 1000,2000,5000,10000,20000]

libcachesim (GPL-3) runs in its own process and has no prefix tree: every block is an independent object of
size 1, so blocks of a request may be evicted while others are looked up, and descendants of an evicted block
stay. An engine can only use a request's leading run of cached blocks: `leading` counts those hits, `hits`
counts all. Blocks are requested from the root, or (`up`) from the last block, which keeps the root longest,
as Gati's LRU does. Gati's policies lock a request while it is served and cache at most its first k blocks.
`Belady` knows the future sequence of blocks, `opt-leaf` that of requests.

libcachesim takes no seeds; Gati's policies are averaged over `--seeds`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.evict_policies import load
from gati.evict import Trace, replay

PEERS = "LRU,S3FIFO,Sieve,ARC,LIRS,WTinyLFU,LeCaR,Cacheus,GDSF,Belady"
OURS = ("lru", "slru", "laru", "gati", "opt-leaf", "opt")
WORKER = Path(__file__).with_name("libcachesim_worker.py")


def peers(
    trace: Trace, sizes: str, policies: str, packages: str, *, up: bool
) -> dict[tuple[int, str], dict[str, float]]:
    """Run libcachesim for each size and policy."""
    with tempfile.TemporaryDirectory(prefix="gati-peers-") as folder:
        file = Path(folder) / "trace.npz"
        np.savez(file, blocks=trace.blocks, starts=trace.starts, time_s=trace.time_s)
        command = [sys.executable, str(WORKER), str(file), "--size", sizes, "--policy", policies]
        said = subprocess.run(
            [*command, "--up"] if up else command,
            env={**os.environ, "PYTHONPATH": packages},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {(each["blocks"], each["policy"]): each for each in found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", required=True, help="folder where libcachesim is installed")
    parser.add_argument("--trace", default="conversation", help="conversation, synthetic, games, or a file")
    parser.add_argument("--size", default="1000,2000,5000,10000,20000")
    parser.add_argument("--policy", default=PEERS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--limit", type=int, default=None)
    given = parser.parse_args()
    trace = load(given.trace, given.limit)
    print(f"{trace.name}: {len(trace):,} requests, {len(trace.blocks):,} blocks\n")
    down = peers(trace, given.size, given.policy, given.packages, up=False)
    up = peers(trace, given.size, given.policy, given.packages, up=True)
    print("| blocks | policy | hits | leading | up: hits | up: leading |\n|---|---|---|---|---|---|")
    for size in map(int, given.size.split(",")):
        for name in given.policy.split(","):
            shares = [each[size, name][kind] for each in (down, up) for kind in ("hits", "leading")]
            print(f"| {size:,} | {name} | {' | '.join(f'{100 * share:.2f}' for share in shares)} |")
        result = replay(trace, [size], OURS, predictor="reuse", seeds=range(given.seeds))
        for name in OURS:
            rate = np.mean([each.hit_rate for each in result.outcomes if each.policy == name])
            print(f"| {size:,} | Gati's {name} | | {100 * rate:.2f} | | |", flush=True)


if __name__ == "__main__":
    main()
