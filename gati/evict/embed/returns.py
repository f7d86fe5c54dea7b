"""Predicts when embedding rows return, online: counts and gaps of each id, and hazards.

A table of fixed size stores, for as many ids as fit, the last request and the mean gap between requests. An
estimate of the gap and the number of occurrences determine one of a few hundred cells. A sample of accesses
is observed; it gives, for each cell and age bin, the share that returned in the bin among those that had not
returned before (a hazard), and hence the worth of a row, as in `gati.evict.predict.hazard`. A prediction is
then a lookup in a table of cells and bins.

Most ids are requested seldom, and those that came twice within a short time mostly by chance. If rates are
distributed as 1 / rate^2, as Zipf's law has it, an id that was seen n times during a span is expected n - 1
times in another one like it: the first request only says that it exists. The span is lengthened by one in
which most cached rows return, or a few requests would mean too much.

Time is counted in requested ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.evict.embed.replacing import RequestedRows
from gati.evict.embed.tiers import Ids
from gati.evict.predict.hazard import ages, seconds_a_hit
from gati.evict.predict.samples import Labels, by_bin, next_fit

Floats = NDArray[np.float64]
Cells = NDArray[np.int16]
_GAPS, _EVIDENCE = 64, 5  # half-octaves of the mean gap; occurrences 1, 2-3, 4-15, 16-63, more
_CELLS = _GAPS * _EVIDENCE
# what is remembered of an id, half a cache line: when it was requested last, and how often over which span
_ENTRY = np.dtype(
    {
        "names": ["id", "last", "span", "seen", "sample"],
        "formats": ["i8", "f8", "f4", "f4", "i8"],  # samples outnumber 32 bits within weeks
        "itemsize": 32,
    }
)
_RAW = np.dtype("V32")  # an entry that is copied as a whole, not field by field
_PAIR = np.dtype("V64")  # two entries next to each other: an id may be in either
# the part of the first request that does not count: nearly all of it, but ids seen once need a finite gap
_FIRST = 0.95
_JUST_BEFORE = 1.0 - 1e-9  # a return at the end of a bin belongs to it: who survives the bin did not return


@dataclass(frozen=True)
class ReturnSettings:
    """Settings of the table of ids and of learning."""

    remembered: int = 8  # ids in the table, as a multiple of the cache's rows; 32 bytes each
    occurrences: float = 64.0  # number of occurrences in the mean gap
    doubt: float = 16.0  # requested ids by which spans are lengthened, as a multiple of the cache's rows
    patience: float = 4.0  # an id is forgotten for another when unseen for so many of its mean gaps
    samples_a_batch: int = 192
    window: int = 20_000  # samples kept
    first_fit: int = 1_500  # samples before the first fit
    growth: float = 1.5  # factor by which the number of samples grows between fits
    longest_step: int = 20_000  # maximum number of samples between fits
    bins: int = 8
    entry: float = 2.0  # to be worth its copying, a row must return so many times as soon as one it replaces
    prior: float = 8.0  # weight of the wider group's hazard, in samples


class _Fitted(NamedTuple):
    edges: Floats  # [bins + 1]
    wait: NDArray[np.float32]  # [cells, bins]: requested ids per hit


class RowReturns:
    """Predicts for the rows of a cache of `capacity` rows."""

    def __init__(self, capacity: int, *, settings: ReturnSettings | None = None, seed: int = 0) -> None:
        self._settings = settings = settings or ReturnSettings()
        size = 1 << max(int(np.ceil(np.log2(max(settings.remembered * capacity, 64)))), 6)
        self._remembered = np.zeros(size, dtype=_ENTRY)
        self._remembered["sample"] = -1
        self._mask = np.uint64(size // 2 - 1)
        self._doubt = np.float32(settings.doubt * capacity)
        window = settings.window
        self._cells = np.zeros(window, dtype=np.int16)  # of the samples, as all below
        self._taken_at = np.zeros(window)
        self._gaps = np.full(window, np.nan)
        self._lost_at = np.full(window, np.inf)
        self._taken = 0
        self._due = settings.first_fit
        self._fitted: _Fitted | None = None
        self._random = np.random.default_rng(seed)
        self.fits = 0

    @property
    def remembered_bytes(self) -> int:
        """Memory of the table of ids in bytes."""
        return self._remembered.nbytes

    def observe(self, batch: RequestedRows) -> Cells:
        """Learn from a batch; returns the cells of its ids, [n]."""
        if self._taken >= self._due:
            self.fit(float(batch.begin))
        now = float(batch.end)
        at, known, before = self._found(batch, now)
        gap, old_span, old_seen = now - before["last"], before["span"], before["seen"]
        counts = batch.counts.astype(np.float32)
        waited = gap.astype(np.float32)
        span, seen = old_span + waited, old_seen + counts
        new = np.flatnonzero(~known)
        span[new], seen[new] = now - batch.begin, counts[new]
        cells = _cells(span + self._doubt, seen)
        stays = ~known & (waited * old_seen < self._settings.patience * old_span)  # never if it is empty
        self._close(before["sample"], known, stays, gap, now)
        written = np.flatnonzero(~stays)
        fade = np.minimum(self._settings.occurrences / seen[written], 1.0)
        after = np.zeros(len(written), dtype=_ENTRY)
        after["id"], after["last"], after["sample"] = batch.ids[written], now, -1
        after["span"], after["seen"] = span[written] * fade, seen[written] * fade
        np.put(self._remembered.view(_RAW), at[written], after.view(_RAW))
        self._watch(batch.ids, at, cells, now)
        return cells

    def waits(self, cells: Cells) -> NDArray[np.float32]:
        """Requested ids per hit for rows of these cells that were just requested, [n]; 0 without a model."""
        if self._fitted is None:
            return np.zeros(cells.shape, dtype=np.float32)
        return self._fitted.wait.take(cells * np.intp(self._fitted.wait.shape[1]))

    def later(self, cells: Cells, age: Floats) -> NDArray[np.float32]:
        """Predicted next uses of rows of these cells, [..., n].

        The first m are cached and have an `age` [..., m]. The others were just requested and are not cached:
        theirs are multiplied by `entry`. Without a model, ages themselves.
        """
        cached = np.s_[..., : age.shape[-1]]
        if self._fitted is None:
            found = np.zeros(cells.shape, dtype=np.float32)
            found[cached] = age
            return found
        edges, wait = self._fitted
        bin_ = np.zeros(age.shape, dtype=np.uint8)
        for edge in edges[1:-1]:  # faster than `searchsorted` for few edges
            bin_ += age >= edge
        at = cells * np.intp(wait.shape[1])
        at[cached] += bin_
        found = wait.take(at)
        found[..., age.shape[-1] :] *= np.float32(self._settings.entry)
        return found

    def fit(self, now: float) -> None:
        """Fit to the current labels of the samples."""
        settings = self._settings
        self._due = next_fit(self._due, settings.growth, settings.longest_step)
        count = min(self._taken, settings.window)
        gaps = self._gaps[:count]
        edges = ages(gaps, settings.bins)
        if edges is None:
            return
        watched = np.minimum(self._lost_at[:count], now) - self._taken_at[:count]
        cells = self._cells[:count].astype(np.int64)
        labels = Labels(cells[:, None].astype(np.float32), gaps * _JUST_BEFORE, watched, np.ones(count))
        sample, number, returned, weights = by_bin(labels, edges)
        bins = len(edges) - 1
        at = cells[sample] * bins + number
        shape = (_GAPS, _EVIDENCE, bins)
        exposed = np.bincount(at, weights, minlength=_CELLS * bins).reshape(shape)
        came = np.bincount(at, weights * returned, minlength=_CELLS * bins).reshape(shape)
        hazards = _shrunk(came.astype(float), exposed.astype(float), settings.prior)
        self._fitted = _Fitted(edges, seconds_a_hit(hazards, edges).astype(np.float32))
        self.fits += 1

    def _found(
        self, batch: RequestedRows, now: float
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.void]]:
        """The place of each id in the table, [n], whether it is there, and the entries of these places.

        An id that is not there is given, of its two places, the one unseen for more of its mean gaps.
        """
        pair = ((batch.places.bits >> np.uint64(8)) & self._mask).astype(np.int64)
        both = self._remembered.view(_PAIR).take(pair).view(_ENTRY).reshape(-1, 2)
        first = both["id"][:, 0] == batch.ids
        way = (both["id"][:, 1] == batch.ids) & ~first  # the second entry is used after the first
        new = np.flatnonzero(~(first | way))
        others = both.take(new, axis=0)
        unseen = np.full(others.shape, np.inf)
        waited = (now - others["last"]) * others["seen"]
        np.divide(waited, others["span"], out=unseen, where=others["seen"] > 0.0)
        way[new] = unseen[:, 1] > unseen[:, 0]
        before = both.reshape(-1).take(2 * np.arange(len(way)) + way)
        known = before["id"] == batch.ids
        known &= before["seen"] > 0.0  # any id may be requested: none says that an entry is empty
        return 2 * pair + way, known, before

    def _close(
        self,
        samples: NDArray[np.int64],
        known: NDArray[np.bool_],
        stays: NDArray[np.bool_],
        gap: Floats,
        now: float,
    ) -> None:
        """End the samples of ids that return, and of those that are forgotten for others."""
        window = self._settings.window
        ended = np.flatnonzero((samples >= max(self._taken - window, 0)) & ~stays)
        returned = ended[known[ended]]
        self._gaps[samples[returned] % window] = gap[returned]
        self._lost_at[samples[ended[~known[ended]]] % window] = now

    def _watch(self, ids: Ids, at: Ids, cells: Cells, now: float) -> None:
        """Take some of the accesses as samples: those of ids that are remembered."""
        step = -(-len(ids) // self._settings.samples_a_batch)
        chosen = np.arange(self._random.integers(step), len(ids), step)
        chosen = chosen[self._remembered["id"][at[chosen]] == ids[chosen]]
        numbers = self._taken + np.arange(len(chosen))
        self._taken += len(chosen)
        places = numbers % self._settings.window
        self._cells[places], self._taken_at[places] = cells[chosen], now
        self._gaps[places], self._lost_at[places] = np.nan, np.inf
        self._remembered["sample"][at[chosen]] = numbers


def _cells(span: NDArray[np.float32], seen: NDArray[np.float32]) -> Cells:
    gap = 2.0 * np.log2(span / (seen - np.float32(_FIRST)))
    cells: Cells = np.minimum(np.maximum(gap, 0.0), _GAPS - 1.0).astype(np.int16)
    cells *= _EVIDENCE
    cells += _GROUPS.take(np.log2(seen).astype(np.int8), mode="clip")
    return cells


_GROUPS = np.array([0, 1, 2, 2, 3, 3, 4, 4], dtype=np.int16)  # by the octave of occurrences


def _shrunk(came: Floats, exposed: Floats, prior: float) -> Floats:
    """Hazards [cells, bins], each drawn towards that of its gap, this towards that of the next longer gap.

    The most popular ids are few and hardly ever sampled: they are at least as popular as the next group.
    """
    everything = (came.sum((0, 1)) + 0.5) / (exposed.sum((0, 1)) + 1.0)
    of_gap = np.empty((len(came) + 1, len(everything)))
    of_gap[-1] = everything
    for gap in reversed(range(len(came))):
        of_gap[gap] = (came[gap].sum(0) + prior * of_gap[gap + 1]) / (exposed[gap].sum(0) + prior)
    cells = (came + prior * of_gap[:-1, None]) / (exposed + prior)
    return np.asarray(cells.reshape(-1, came.shape[2]))
