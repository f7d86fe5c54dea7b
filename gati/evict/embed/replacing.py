"""The base of policies for embedding rows, which is LRU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.evict.embed.sets import WAYS, Hashed, RowSets, leaving
from gati.evict.embed.tiers import Ids


@dataclass(frozen=True)
class RequestedRows:
    """One batch: its distinct ids, [n], with their sets, counts and positions."""

    ids: Ids
    places: Hashed
    counts: Ids  # how often each occurs
    recency: Ids  # the batch's beginning plus the last position of each in it
    begin: int  # ids requested before it
    end: int  # ids requested up to its end
    cells: NDArray[np.int16] | None = None  # a predictor's cell for each

    def part(self, which: NDArray[Any]) -> RequestedRows:
        """The part of the batch with some of its ids."""
        places = Hashed(*(each[which] for each in self.places))
        return RequestedRows(
            self.ids[which], places, self.counts[which], self.recency[which], self.begin, self.end
        )

    def of(self, cells: NDArray[np.int16]) -> RequestedRows:
        """A copy with the cells of its ids."""
        return replace(self, cells=cells)


class EvictionLimits(NamedTuple):
    """How the sets evict, [sets] each: how many of LRU's choice first, then among how many of LRU's queue."""

    safe: Ids
    window: Ids


class RowPolicy:
    """LRU within each set. Predicting policies override the methods below `shrink`.

    The cache holds its lock during every call.
    """

    name: ClassVar[str] = "lru"

    def __init__(self, sets: RowSets) -> None:
        self.sets = sets

    def replace(self, batch: RequestedRows, slots: Ids) -> tuple[Ids, Ids, Ids]:
        """Serve a batch of which `slots` [n] says what is cached, -1 for what was fetched.

        Returns the emptied slots, the indices in the batch of the fetched ids that are now cached, and the
        slots of these ids, some of which were just emptied.
        """
        sets = self.sets
        hits = np.flatnonzero(slots >= 0)
        fetched = np.flatnonzero(slots < 0)
        limits = self.limits(batch, slots)
        sets.recency[slots[hits]] = batch.recency[hits]
        self.touch(batch, hits, slots[hits])
        asked = np.bincount(batch.places.homes[fetched], minlength=sets.sets)
        count = np.maximum(sets.used + asked - sets.room, 0)
        full = (count > 0)[batch.places.homes[fetched]]
        emptied, bypassed = self._evict(count, limits, batch, fetched[full])
        stays = slots < 0
        stays[bypassed] = False
        kept = np.flatnonzero(stays)
        entering = batch.part(kept)
        placed = sets.put(entering.ids, entering.places, entering.recency)
        self.touch(batch, kept, placed)
        return emptied, kept, placed

    def shrink(self) -> Ids:
        """Empty slots until no set exceeds its capacity; returns these slots."""
        count = np.maximum(self.sets.used - self.sets.room, 0)
        limits = EvictionLimits(np.zeros_like(count), self.windows())
        return self._evict(count, limits, None, np.zeros(0, dtype=np.int64))[0]

    def _evict(
        self, count: Ids, limits: EvictionLimits, batch: RequestedRows | None, fetched: Ids
    ) -> tuple[Ids, Ids]:
        """Evict `count` [sets] of what is held and `fetched`: the slots, and the numbers in the batch."""
        sets = self.sets
        if not count.any():
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing
        held = sets.held(count > 0)
        ids, homes, recency = sets.ids[held], held // WAYS, sets.recency[held]
        if batch is not None:
            ids = np.concatenate((ids, batch.ids[fetched]))
            homes = np.concatenate((homes, batch.places.homes[fetched]))
            recency = np.concatenate((recency, batch.recency[fetched]))
        ask = bool((limits.window > 1).any())
        later = self.later(held, batch, fetched) if ask else None
        gone, against = leaving(
            homes, recency, later, count=count, safe=limits.safe, window=np.minimum(limits.window, sets.room)
        )
        if batch is not None:
            self.evicted(ids[gone[against]], homes[gone[against]])
        emptied = held[gone[gone < len(held)]]
        sets.remove(emptied)
        return emptied, fetched[gone[gone >= len(held)] - len(held)]

    def observe(self, batch: RequestedRows) -> RequestedRows:
        """Process a requested batch; `replace` then receives the returned one, unless the slow tier fails.

        Other batches may be observed in between.
        """
        return batch

    def limits(self, batch: RequestedRows, slots: Ids) -> EvictionLimits:
        """The eviction limits of the sets for this batch, which is not served yet."""
        return EvictionLimits(np.zeros_like(self.sets.used), self.windows())

    def windows(self) -> Ids:
        """The number of least recently used ids from which each set may choose, [sets]."""
        return np.ones_like(self.sets.used)

    def touch(self, batch: RequestedRows, which: Ids, slots: Ids) -> None:
        """Called when ids of the batch were cached in these slots."""

    def later(self, held: Ids, batch: RequestedRows | None, fetched: Ids) -> NDArray[np.float64] | None:
        """Predicted next uses of slots `held`, then of the `fetched` ids; None without predictions."""
        return None

    def evicted(self, ids: Ids, homes: Ids) -> None:
        """Called for evicted ids, with their sets, that LRU would have kept."""

    def forget(self) -> None:
        """Called when the cache was emptied."""

    def figures(self) -> Mapping[str, Any]:
        """The policy's counts, as JSON values."""
        return {}
