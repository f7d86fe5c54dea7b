"""The future of a trace: for oracles and limits only."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from gati.evict.trace.records import Trace


def next_uses(trace: Trace) -> NDArray[np.float64]:
    """For every block of every request: the number of the next request that holds it, or infinity. [n]."""
    blocks = trace.blocks
    request = np.repeat(np.arange(len(trace)), trace.lengths)
    order = np.lexsort((request, blocks))
    after = np.full(len(blocks), np.inf)
    same = blocks[order[:-1]] == blocks[order[1:]]
    after[order[:-1][same]] = request[order[1:][same]]
    return after


def belady_hits(trace: Trace, capacity: int) -> NDArray[np.int64]:
    """Hits of each request, [requests], if the blocks were a flat sequence and all were known ahead.

    A block is kept only where it is used before one that is cached already, so that no policy hits more
    often, be it bound to load what it misses or not.
    """
    after = next_uses(trace).tolist()
    until: dict[int, float] = {}  # cached blocks and their next use
    heap: list[tuple[float, int]] = []
    hits = np.zeros(len(trace), dtype=np.int64)
    at = 0
    for number, ids in enumerate(trace.requests):
        count = 0
        for block in ids:
            due = after[at]
            at += 1
            if block in until:
                count += 1
                del until[block]
            if due == np.inf:
                continue
            until[block] = due
            heapq.heappush(heap, (-due, block))
            while len(until) > capacity:
                furthest, victim = heapq.heappop(heap)
                if until.get(victim) == -furthest:
                    del until[victim]
        hits[number] = count
    return hits
