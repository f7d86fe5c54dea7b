"""A set-associative index: the slot of each cached id, and its last use.

The hash of an id determines its set; the id may be in any of the set's 64 ways, in slot `set * 64 + way`.
Each slot also has one byte of the hash, which detects nearly all misses without comparing ids.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.evict.embed.leaving import NEVER
from gati.evict.embed.tiers import Ids

WAYS = 64
_EMPTY = -1
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
        self.recency = np.full(self.sets * WAYS, NEVER)  # larger means used later
        self._tags = np.zeros((self.sets, WAYS), dtype=np.uint8)

    def allow(self, capacity: int) -> None:
        """Divide a capacity among the sets. The caller then removes surplus ids."""
        capacity = min(capacity, self.sets * WAYS)
        self.room = capacity // self.sets + (np.arange(self.sets) < capacity % self.sets)

    def find(self, ids: Ids, places: Hashed) -> Ids:
        """Slots of ids, -1 where an id is not cached, [n]."""
        slots = np.full(len(ids), -1, dtype=np.int64)
        alike = self._tags.take(places.homes, axis=0) == places.tags[:, None]
        flat = np.flatnonzero(alike)
        which = flat // WAYS
        at = places.homes[which] * WAYS + flat % WAYS
        same = np.flatnonzero(self.ids[at] == ids[which])
        slots[which[same]] = at[same]
        return slots

    def remove(self, slots: Ids) -> None:
        """Empty used slots, each listed once."""
        self.ids[slots], self.recency[slots] = _EMPTY, NEVER
        self.used -= np.bincount(slots // WAYS, minlength=self.sets)

    def clear(self) -> None:
        """Empty all slots, whatever state they are in."""
        self.ids[:], self.recency[:], self.used[:] = _EMPTY, NEVER, 0

    def put(self, ids: Ids, places: Hashed, recency: Ids) -> Ids:
        """Insert ids that are not cached into sets with room for them; returns their slots."""
        slots = np.empty(len(ids), dtype=np.int64)
        if len(ids) == 0:
            return slots
        counts = np.bincount(places.homes, minlength=self.sets)
        chosen = np.flatnonzero(counts)
        empty = np.flatnonzero(self.ids.reshape(self.sets, WAYS).take(chosen, axis=0) == _EMPTY)  # by set
        of = empty // WAYS
        enters = ranks(of, len(chosen)) < counts[chosen][of]
        slots[by_home(places.homes, self.sets)] = (chosen[of] * WAYS + empty % WAYS)[enters]
        self.ids[slots] = ids
        self.recency[slots] = recency
        self._tags.reshape(-1)[slots] = places.tags
        self.used += counts
        return slots


def ranks(homes: Ids, sets: int) -> Ids:
    """Return the rank of each id within its set; `homes` is sorted."""
    counts = np.bincount(homes, minlength=sets)
    return np.arange(len(homes)) - (np.cumsum(counts) - counts)[homes]


def by_home(homes: Ids, sets: int) -> Ids:
    """The order by set, and within a set as given."""
    return np.argsort(homes.astype(np.uint16) if sets <= 2**16 else homes, kind="stable")
