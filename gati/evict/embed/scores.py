"""Scores for embedding tables that evict by caller-defined scores, such as those on GPUs.

NVIDIA's HierarchicalKV (`EvictStrategy::kCustomized`) and dynamicemb (`DynamicEmbScoreStrategy.CUSTOMIZED`)
evict the row of the smallest score, a whole number of 64 bits that came with its last insert or assignment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.embed.distinct import distinct
from gati.evict.embed.replacing import RequestedRows
from gati.evict.embed.returns import RowReturns
from gati.evict.embed.sets import hashed
from gati.evict.embed.tiers import Ids
from gati.evict.seeds import check_seed

_LONGEST = 2.0**40  # requested ids: no row is worth waiting longer for


class RowScores:
    """Learns from the ids that are requested of a table of `rows` rows, and scores them. Not thread-safe.

    A score is when a row was requested, less how long a hit of it takes, both in requested ids: LRU where
    all rows are alike, and popular rows stay for longer.

    >>> import numpy as np
    >>> scores = RowScores(rows=1_000)
    >>> first, second = scores.scores(np.array([7, 3, 7])), scores.scores(np.array([5]))
    >>> bool(first[0] == first[2] < second[0])
    True
    """

    def __init__(self, rows: int, *, seed: int = 0) -> None:
        """Raises EvictError for a table without rows, and for a seed out of range."""
        check_seed(seed)
        if rows < 1:
            raise EvictError(f"rows is {rows}; a table holds at least 1")
        self._rows = rows
        self._returns = RowReturns(rows, seed=seed)
        self._clock = 0

    def scores(self, ids: Ids | NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One score for each id [n] of a batch, with duplicates; the smallest is evicted first.

        Ids are any numbers of 64 bits, with or without sign. Raises EvictError for others.
        """
        given: NDArray[Any] = np.asarray(ids)
        if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size > 0):
            raise EvictError(f"ids have shape {given.shape} and type {given.dtype}; give whole numbers [n]")
        asked = distinct(given.astype(np.int64))  # by their bits
        begin, self._clock = self._clock, self._clock + len(asked.places)
        batch = RequestedRows(
            asked.ids, hashed(asked.ids, 1), asked.counts, begin + asked.last, begin, self._clock
        )
        if len(asked.ids) == 0:
            return np.zeros(0, dtype=np.uint64)
        cells = self._returns.observe(batch)
        wait = self._returns.waits(cells).astype(np.float64)
        if self._returns.fits == 0:
            wait = np.full(len(cells), float(self._rows))  # so that later scores compare with these
        found = self._clock + _LONGEST - np.minimum(wait, _LONGEST)
        return asked.spread(found.astype(np.uint64))
