"""A set-associative index: the slot of each cached id, and its last use.

The hash of an id determines its set; the id may be in any of the set's 64 ways, in slot `set * 64 + way`.
Each slot also has one byte of the hash, which detects nearly all misses without comparing ids.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.evict.embed.tiers import Ids

WAYS = 64
_EMPTY = -1
_SPARSE = 16  # where a row for each set would be so many times as large as what is in them, it is not made
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Hashed(NamedTuple):
    """Where ids belong, [n] each: a set, one byte to compare, and 64 bits for other tables."""

    homes: Ids
    tags: NDArray[np.uint8]
    bits: NDArray[np.uint64]


def hashed(ids: Ids, sets: int) -> Hashed:
    """Hash ids into `sets` sets (the finaliser of splitmix64)."""
    bits = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    bits ^= bits >> np.uint64(31)
    homes = ((bits >> np.uint64(32)) * np.uint64(sets) >> np.uint64(32)).astype(np.int64)
    return Hashed(homes, (bits & np.uint64(255)).astype(np.uint8), bits)


class RowSets:
    """At most `most` ids in sets of `WAYS`; how many each set may hold is set by `allow`."""

    def __init__(self, most: int) -> None:
        self.sets = max(-(-most // WAYS), 1)
        self.room = np.zeros(self.sets, dtype=np.int64)  # ids a set may hold
        self.used = np.zeros(self.sets, dtype=np.int64)  # ids it holds
        self.ids = np.full(self.sets * WAYS, _EMPTY, dtype=np.int64)
        self.recency = np.zeros(self.sets * WAYS, dtype=np.int64)  # larger means used later
        self._tags = np.zeros((self.sets, WAYS), dtype=np.uint8)

    def allow(self, capacity: int) -> None:
        """Divide a capacity among the sets. The caller then removes surplus ids."""
        capacity = min(capacity, self.sets * WAYS)
        self.room = capacity // self.sets + (np.arange(self.sets) < capacity % self.sets)

    def find(self, ids: Ids, places: Hashed) -> Ids:
        """Slots of ids, -1 where an id is not cached, [n]."""
        slots = np.full(len(ids), -1, dtype=np.int64)
        alike = self._tags[places.homes] == places.tags[:, None]
        which, ways = np.divmod(np.flatnonzero(alike), WAYS)
        at = places.homes[which] * WAYS + ways
        same = self.ids[at] == ids[which]
        slots[which[same]] = at[same]
        return slots

    def held(self, homes: NDArray[np.bool_]) -> Ids:
        """Used slots of the marked sets, [sets]."""
        used = self.ids.reshape(self.sets, WAYS) != _EMPTY
        return np.flatnonzero(used & homes[:, None])

    def remove(self, slots: Ids) -> None:
        """Empty used slots, each listed once."""
        self.ids[slots] = _EMPTY
        self.used -= np.bincount(slots // WAYS, minlength=self.sets)

    def put(self, ids: Ids, places: Hashed, recency: Ids) -> Ids:
        """Insert ids that are not cached into sets with room for them; returns their slots."""
        slots = np.empty(len(ids), dtype=np.int64)
        if len(ids) == 0:
            return slots
        counts = np.bincount(places.homes, minlength=self.sets)
        empty = np.flatnonzero(
            (self.ids.reshape(self.sets, WAYS) == _EMPTY) & (counts > 0)[:, None]
        )  # by set
        empty = empty[ranks(empty // WAYS, self.sets) < counts[empty // WAYS]]
        slots[np.argsort(places.homes, kind="stable")] = empty
        self.ids[slots] = ids
        self.recency[slots] = recency
        self._tags.reshape(-1)[slots] = places.tags
        self.used += counts
        return slots


def ranks(homes: Ids, sets: int) -> Ids:
    """Return the rank of each id within its set; `homes` is sorted."""
    counts = np.bincount(homes, minlength=sets)
    return np.arange(len(homes)) - (np.cumsum(counts) - counts)[homes]


def leaving(
    homes: Ids,
    recency: Ids,
    later: NDArray[np.float64] | None,
    *,
    count: Ids,
    safe: Ids,
    window: Ids,
) -> tuple[Ids, NDArray[np.bool_]]:
    """Choose the ids to evict from all sets, with the same result as one eviction after another.

    Set s evicts `count[s]` ids: first the `safe[s]` least recently used, then each time, of the `window[s]`
    least recently used, the one with the latest predicted use, `later` [n]. Loaded ids enter as the most
    recently used, so each eviction advances the window by one. In the end

        all but the `window - 1` best of the oldest `count + window - 1` are evicted; among equals, the older.

    Returns the indices of the evicted ids, and which of them LRU would have kept.
    """
    sets = len(count)
    order = by_set(homes, recency - (recency.min() if len(recency) else 0), sets)
    window = np.maximum(window, 1)
    homes = homes[order]
    place = ranks(homes, sets)
    gone = place < np.minimum(safe, count)[homes]
    chosen = (count - safe)[homes] > 0
    zone = ~gone & chosen & (place < (count + window - 1)[homes])
    if later is None or (window <= 1).all():
        gone |= zone & (place < count[homes])
    else:
        inside = np.flatnonzero(zone)
        latest = _latest(homes[inside], place[inside], later[order[inside]], inside, count - safe)
        gone[latest] = True
    return order[gone], (place >= count[homes])[gone]


def _latest(homes: Ids, place: Ids, later: NDArray[np.float64], number: Ids, many: Ids) -> Ids:
    """The `number` of those used latest, `many[s]` of set s, of equals the smallest.

    `homes` is sorted, and `place` says where among its set each stands.
    """
    sets, width = len(many), int(place.max(initial=-1)) + 1
    # the bits of floats that are not negative are in the order of the floats
    bits = np.maximum(later, 0.0).astype(np.float32).view(np.int32).astype(np.int64)
    keys = bits.max(initial=0) - bits
    if sets * width > _SPARSE * len(keys):
        order = np.lexsort((number, keys, homes))
        return number[order[ranks(homes[order], sets) < many[homes[order]]]]
    number_bits = int(number.max(initial=0)).bit_length()
    rows = np.full((sets, width), np.iinfo(np.int64).max)
    rows[homes, place] = (keys << number_bits) | number
    rows.sort(axis=1)
    first = rows[np.arange(width) < many[:, None]]
    return first[first < np.iinfo(np.int64).max] & ((1 << number_bits) - 1)


def by_set(homes: Ids, keys: Ids, sets: int) -> Ids:
    """The order by set, then key, then as given; keys are not negative."""
    counts = np.bincount(homes, minlength=sets)
    width, place_bits = int(counts.max(initial=0)), len(keys).bit_length()
    if sets * width > _SPARSE * len(keys) or int(keys.max(initial=0)).bit_length() + place_bits > 63:
        return np.lexsort((keys, homes))
    # A row for each set, as many short sorts are ten times as fast as a long one. Numbers end with the place.
    first = np.argsort(homes.astype(np.uint16) if sets <= 2**16 else homes, kind="stable")
    homes, keys = homes[first], keys[first]
    rows = np.full((sets, width), np.iinfo(np.int64).max)
    rows[homes, ranks(homes, sets)] = (keys << place_bits) | first
    rows.sort(axis=1)
    return rows[np.arange(width) < counts[:, None]] & ((1 << place_bits) - 1)
