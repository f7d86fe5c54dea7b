"""Which ids leave their sets, for many sets at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gati.evict.embed.tiers import Ids

NEVER = np.iinfo(np.int64).max  # recency where there is no id


def leaving(
    recency: Ids, later: NDArray[np.float32] | None, *, count: Ids, safe: Ids, window: Ids
) -> tuple[Ids, NDArray[np.bool_]]:
    """Choose the ids to evict from sets, with the same result as one eviction after another.

    `recency` [sets, places] has a row for each set, in any order, NEVER where there is no id. Set s evicts
    `count[s]` ids: first the `safe[s]` least recently used, then each time, of the `window[s]` least recently
    used, the one with the latest predicted use, `later` [sets, places]. Loaded ids enter as the most recently
    used, so each eviction advances the window by one. In the end

        all but the `window - 1` best of the oldest `count + window - 1` are evicted; among equals, the older.

    Returns the indices of the evicted ids in the flat `recency`, and which of them LRU would have kept.
    """
    sets, places = recency.shape
    bits = places.bit_length()
    queue = _packed(recency, bits)
    queue.sort(axis=1)  # many short sorts are ten times as fast as a long one
    queue &= (1 << bits) - 1
    queue += (np.arange(sets) * places)[:, None]
    rank = np.arange(places)
    if later is None or (window <= 1).all():
        gone = rank < count[:, None]
    else:
        safe = np.minimum(safe, count)
        end = count + np.where(safe < count, np.maximum(window, 1) - 1, 0)
        gone = rank < safe[:, None]
        # the bits of floats that are not negative are in the order of the floats
        values = np.maximum(later.reshape(-1).take(queue), np.float32(0.0)).view(np.int32)
        keys = np.left_shift(np.int64(np.iinfo(np.int32).max) - values, bits, dtype=np.int64)
        keys |= rank
        keys[gone | (rank >= end[:, None])] = NEVER
        keys.sort(axis=1)
        chosen = (keys & ((1 << bits) - 1)) + (np.arange(sets) * places)[:, None]
        gone.reshape(-1)[chosen[rank < (count - safe)[:, None]]] = True
    at = np.flatnonzero(gone)
    return queue.reshape(-1).take(at), at % places >= count.repeat(count)


def _packed(recency: Ids, bits: int) -> Ids:
    """Numbers in the order of recency, each ending with its place in `bits`."""
    places = np.arange(recency.shape[1])
    least = recency.min(initial=NEVER)
    most = NEVER >> bits
    return np.asarray(np.minimum(recency - least, most) << bits | places)
