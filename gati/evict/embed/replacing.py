"""The base of policies for embedding rows, which is LRU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.evict.embed.leaving import NEVER, leaving
from gati.evict.embed.sets import WAYS, Hashed, RowSets, by_home, ranks
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


class EvictionLimits(NamedTuple):
    """How the sets evict, [sets] each: how many of LRU's choice first, then among how many of LRU's queue."""

    safe: Ids
    window: Ids


class ServedRows(NamedTuple):
    """What serving a batch changes before rows are replaced; `RowPolicy.commit` carries it out."""

    limits: EvictionLimits
    hits: Ids  # numbers in the batch
    slots: Ids  # of the hits
    record: Callable[[], None]  # has the policy count the batch


class LeavingRows(NamedTuple):
    """What leaves: slots, numbers in the batch, and which ids LRU would have kept, with their sets."""

    slots: Ids
    numbers: Ids
    against_lru: Ids
    homes_against_lru: Ids


class RowChanges(NamedTuple):
    """What a batch changes: what leaves, and the numbers in the batch of the fetched ids that stay."""

    leaving: LeavingRows
    kept: Ids


class Competing(NamedTuple):
    """Ids that compete for some sets, as a row of `width` places for each: its slots, then fetched ids."""

    sets: Ids
    width: int
    fetched: Ids  # numbers in the batch
    at: Ids  # place of each in the flat rows


class RowPolicy:
    """LRU within each set. Predicting policies override the methods below `shrink`.

    The cache holds its lock during every call.
    """

    name: ClassVar[str] = "lru"

    def __init__(self, sets: RowSets) -> None:
        self.sets = sets
        self._by_slot: tuple[NDArray[Any], ...] = (sets.recency,)  # what changes where an id is used

    def serve(self, batch: RequestedRows, slots: Ids) -> ServedRows:
        """Process a batch; `slots` [n] says what is cached, -1 for what is not. Nothing changes yet."""
        hits = np.flatnonzero(slots >= 0)
        limits, record = self.limits(batch, slots)
        return ServedRows(limits, hits, slots[hits], record)

    def commit(self, batch: RequestedRows, served: ServedRows) -> None:
        """Carry out what `serve` decided, with nothing changed since."""
        served.record()
        self._use(batch, served)

    def foresee(self, batch: RequestedRows, slots: Ids, served: ServedRows) -> RowChanges:
        """What `plan` will return once the batch is committed; nothing changes yet."""
        before = [each[served.slots] for each in self._by_slot]
        self._use(batch, served)
        try:
            return self.plan(batch, slots, served.limits)
        finally:
            for each, values in zip(self._by_slot, before, strict=True):
                each[served.slots] = values

    def plan(self, batch: RequestedRows, slots: Ids, limits: EvictionLimits) -> RowChanges:
        """Decide what a committed batch replaces; nothing changes yet."""
        sets = self.sets
        fetched = np.flatnonzero(slots < 0)
        homes = batch.places.homes[fetched]
        count = np.maximum(sets.used + np.bincount(homes, minlength=sets.sets) - sets.room, 0)
        leaving = self._leaving(count, limits, batch, fetched[(count > 0)[homes]])
        stays = slots < 0
        stays[leaving.numbers] = False
        return RowChanges(leaving, np.flatnonzero(stays))

    def replace(self, batch: RequestedRows, changes: RowChanges) -> Ids:
        """Carry out what was planned, with nothing changed since; returns the slots of the kept ids."""
        leaving, kept = changes
        self.sets.remove(leaving.slots)
        self.evicted(leaving.against_lru, leaving.homes_against_lru)
        entering = batch.part(kept)
        placed = self.sets.put(entering.ids, entering.places, entering.recency)
        self.touch(batch, kept, placed)
        return placed

    def shrink(self) -> Ids:
        """Empty slots until no set exceeds its capacity; returns these slots."""
        count = np.maximum(self.sets.used - self.sets.room, 0)
        limits = EvictionLimits(np.zeros_like(count), self.windows())
        slots = self._leaving(count, limits, None, np.zeros(0, dtype=np.int64)).slots
        self.sets.remove(slots)
        return slots

    def _use(self, batch: RequestedRows, served: ServedRows) -> None:
        self.sets.recency[served.slots] = batch.recency[served.hits]
        self.touch(batch, served.hits, served.slots)

    def _leaving(
        self, count: Ids, limits: EvictionLimits, batch: RequestedRows | None, fetched: Ids
    ) -> LeavingRows:
        """Choose `count` [sets] of what is held and of the `fetched` numbers of the batch."""
        homes = batch.places.homes[fetched] if batch is not None else fetched
        crowds = np.bincount(homes, minlength=len(count))
        # sets in which many times as many ids compete as in others are apart: all have rows of one length
        step = 2 * len(homes) // max(int(np.count_nonzero(count)), 1) + WAYS
        group = np.where(count > 0, np.frexp(crowds // step)[1], -1)
        parts = [
            self._leaving_some(
                np.flatnonzero(group == each), count, limits, batch, fetched[group[homes] == each]
            )
            for each in range(int(group.max()) + 1)
        ]
        if len(parts) == 1:
            return parts[0]
        nothing = np.zeros((len(LeavingRows._fields), 0), dtype=np.int64)
        return LeavingRows(*map(np.concatenate, zip(nothing, *parts, strict=True)))

    def _leaving_some(
        self, chosen: Ids, count: Ids, limits: EvictionLimits, batch: RequestedRows | None, fetched: Ids
    ) -> LeavingRows:
        """The same for the `chosen` sets."""
        sets = self.sets
        width, at = WAYS, fetched
        if batch is not None:
            homes = batch.places.homes[fetched]
            order = by_home(homes, sets.sets)
            fetched, homes = fetched[order], homes[order]
            rank = ranks(homes, sets.sets)
            width += int(rank.max(initial=-1)) + 1
            row = np.empty(sets.sets, dtype=np.int64)
            row[chosen] = np.arange(len(chosen))
            at = row[homes] * width + rank + WAYS
        recency = np.full((len(chosen), width), NEVER)
        recency[:, :WAYS] = sets.recency.reshape(-1, WAYS).take(chosen, axis=0)
        if batch is not None:
            recency.reshape(-1)[at] = batch.recency[fetched]
        window = np.minimum(limits.window, sets.room)[chosen]
        later = None
        if (window > 1).any():
            later = self.later(Competing(chosen, width, fetched, at), batch)
        gone, against = leaving(recency, later, count=count[chosen], safe=limits.safe[chosen], window=window)
        homes = chosen.repeat(count[chosen])  # of what leaves
        held = gone % width < WAYS
        slots = homes[held] * WAYS + gone[held] % width
        number = np.empty(recency.size, dtype=np.int64)
        number[at] = fetched
        numbers = number[gone[~held]]
        ids = np.empty(len(gone), dtype=np.int64)
        ids[held], ids[~held] = sets.ids[slots], numbers if batch is None else batch.ids[numbers]
        return LeavingRows(slots, numbers, ids[against], homes[against])

    def observe(self, batch: RequestedRows) -> RequestedRows:
        """Learn from a requested batch; the methods above then receive the returned one.

        Other batches may be observed in between.
        """
        return batch

    def limits(self, batch: RequestedRows, slots: Ids) -> tuple[EvictionLimits, Callable[[], None]]:
        """The eviction limits of the sets for this batch, and a function that counts it."""
        return EvictionLimits(np.zeros_like(self.sets.used), self.windows()), _nothing

    def windows(self) -> Ids:
        """The number of least recently used ids from which each set may choose, [sets]."""
        return np.ones_like(self.sets.used)

    def touch(self, batch: RequestedRows, which: Ids, slots: Ids) -> None:
        """Called when ids of the batch were cached in these slots."""

    def later(self, competing: Competing, batch: RequestedRows | None) -> NDArray[np.float32] | None:
        """Predicted next uses, [sets, width]; None without predictions."""
        return None

    def evicted(self, ids: Ids, homes: Ids) -> None:
        """Called for evicted ids, with their sets, that LRU would have kept."""

    def forget(self, ids: Ids | None = None) -> None:
        """Called when these ids, by default all, were dropped on demand, or were not cached as planned."""

    def figures(self) -> Mapping[str, Any]:
        """The policy's counts, as JSON values."""
        return {}


def _nothing() -> None:
    """LRU counts nothing."""
