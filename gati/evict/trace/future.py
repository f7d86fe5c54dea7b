"""The future of a trace, only for oracles and upper bounds."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from gati.evict.trace.numbering import Ints
from gati.evict.trace.records import Trace


def next_uses(trace: Trace) -> NDArray[np.float64]:
    """For every block of every request, the number of the next request with it, or infinity, [n]."""
    request = np.append(np.repeat(np.arange(len(trace)), trace.lengths), np.inf)
    return request[_next_places(trace)]


def belady_hits(trace: Trace, capacity: int) -> Ints:
    """Hits of each request, [requests], for a flat sequence of blocks that is known in advance (Belady).

    A block is cached only if it is used before one that is already cached. So no policy has more hits,
    whether it must cache every miss or not. Of two blocks of one request, the first is used before the other.
    """
    due: set[int] = set()  # where each cached block is used next
    furthest: list[int] = []  # the same, negated, as a heap; those that have passed stay at its end
    hit = np.zeros(len(trace.blocks), dtype=np.int64)
    for at, following in enumerate(_next_places(trace).tolist()):
        if at in due:
            due.remove(at)
            hit[at] = 1
        if following < len(hit):
            due.add(following)
            heapq.heappush(furthest, -following)
            if len(due) > capacity:
                due.remove(-heapq.heappop(furthest))
    return np.diff(np.append(0, np.cumsum(hit))[trace.starts])


def _next_places(trace: Trace) -> Ints:
    """Where in the sequence of blocks each one occurs next; the length of the sequence if never, [n]."""
    blocks = trace.blocks
    order = np.argsort(blocks, kind="stable")
    following = np.full(len(blocks), len(blocks))
    same = blocks[order[:-1]] == blocks[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    return following
