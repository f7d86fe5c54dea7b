"""The distinct ids of a batch, with their counts and last positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.evict.embed.tiers import Ids


class DistinctIds(NamedTuple):
    """Distinct ids [n] of a batch [m], sorted as unsigned numbers."""

    ids: Ids
    counts: Ids  # how often each occurs
    last: Ids  # last position of each in the batch
    places: Ids  # [m], all positions, by id

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """From values of the distinct ids, [n], that of each id of the batch, [m]."""
        found = np.empty(len(self.places), dtype=values.dtype)
        found[self.places] = values.repeat(self.counts)
        return found


def distinct(batch: Ids) -> DistinctIds:
    """Find the distinct ids of a batch."""
    size = len(batch)
    ordered, places = _in_order(batch)
    begins: NDArray[np.bool_] = np.ones(size, dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
    first = np.flatnonzero(begins)
    ends = np.append(first[1:], size) if size else first
    return DistinctIds(ordered[first], ends - first, places[ends - 1], places)


def _in_order(batch: Ids) -> tuple[Ids, Ids]:
    """The ids in order, those that are equal as they come, and where in the batch each was."""
    ordered, places = batch.view(np.uint64), np.arange(len(batch))
    for shift in range(0, max(int(ordered.max(initial=0)).bit_length(), 1), 16):
        # a stable sort of 16 bits is a radix sort, which is several times as fast as others
        order = np.argsort((ordered >> np.uint64(shift)).astype(np.uint16), kind="stable")
        ordered, places = ordered[order], places[order]
    return ordered.view(np.int64), places
