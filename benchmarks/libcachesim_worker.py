"""Replay blocks under libcachesim's policies, in a separate process without Gati because of the GPL.

    python benchmarks/libcachesim_worker.py FILE --size 2000,5000 --policy ARC,LIRS [--up]

FILE is written by `benchmarks.evict_peers`: `blocks` of all requests, `starts` of requests, `time_s`. Prints
one line of JSON per size and policy: the share of blocks that hit, and the share that hit along with all
earlier blocks of the request, which an engine can use.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import libcachesim
import numpy as np
from numpy.typing import NDArray

NEVER = 2**63 - 1


def next_asked(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position [n] of each block's next request, or NEVER."""
    found = np.full(len(blocks), NEVER, dtype=np.int64)
    order = np.argsort(blocks, kind="stable")
    again = blocks[order[1:]] == blocks[order[:-1]]
    found[order[:-1][again]] = order[1:][again]
    return found


def replay(cache: Any, blocks: NDArray[np.int64], seconds: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each block hit, [n]."""
    hits = np.zeros(len(blocks), dtype=np.bool_)
    given = zip(blocks.tolist(), seconds.tolist(), next_asked(blocks).tolist(), strict=True)
    for at, (block, second, following) in enumerate(given):
        request = libcachesim.Request(
            obj_size=1, obj_id=block, clock_time=second, next_access_vtime=following
        )
        hits[at] = cache.get(request)
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--size", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--up", action="store_true", help="request blocks from last to first")
    given = parser.parse_args()
    trace = np.load(given.file)
    starts, lengths = trace["starts"][:-1], np.diff(trace["starts"])
    number = np.repeat(np.arange(len(lengths)), lengths)  # request index of each block
    order = np.arange(len(number))
    if given.up:
        order = (2 * starts + lengths - 1)[number] - order
    blocks, seconds = trace["blocks"][order], trace["time_s"][number].astype(np.int64)
    for size in map(int, given.size.split(",")):
        for name in given.policy.split(","):
            cache = getattr(libcachesim, name)(cache_size=size, hashpower=20)
            hits = np.zeros(len(blocks), dtype=np.bool_)
            hits[order] = replay(cache, blocks, seconds)
            missed = np.cumsum(~hits)
            before = (missed - ~hits)[starts]
            leading = hits & (missed == before[number])
            print(
                json.dumps({"blocks": size, "policy": name, "hits": hits.mean(), "leading": leading.mean()})
            )


if __name__ == "__main__":
    main()
