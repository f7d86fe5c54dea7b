"""The future of a trace, only for oracles and upper bounds."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from gati.evict.trace.records import Trace


def next_uses(trace: Trace) -> NDArray[np.float64]:
    """For every block of every request, the number of the next request with it, or infinity, [n]."""
    blocks = trace.blocks
    request = np.repeat(np.arange(len(trace)), trace.lengths)
    order = np.lexsort((request, blocks))
    after = np.full(len(blocks), np.inf)
    same = blocks[order[:-1]] == blocks[order[1:]]
    after[order[:-1][same]] = request[order[1:][same]]
    return after


def belady_hits(trace: Trace, capacity: int) -> NDArray[np.int64]:
    """Hits of each request, [requests], for a flat sequence of blocks that is known in advance (Belady).

    A block is cached only if it is used before one that is already cached. So no policy has more hits,
    whether it must cache every miss or not.
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
