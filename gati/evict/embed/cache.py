"""`EmbeddingCache`: an `nn.EmbeddingBag` with its rows in a slow tier, and a cache of the most useful."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from gati.errors import EvictError
from gati.evict.embed.checks import (
    MODES,
    check_ids,
    check_numbers,
    check_offsets,
    check_range,
    check_weights,
    padding_of,
)
from gati.evict.embed.distinct import DistinctIds, distinct
from gati.evict.embed.policies import row_policy
from gati.evict.embed.pool import PagePool
from gati.evict.embed.replacing import RequestedRows, RowChanges, ServedRows
from gati.evict.embed.sets import Hashed, RowSets, hashed
from gati.evict.embed.slab import RowSlab, one_by_row, own_pool
from gati.evict.embed.tiers import AskedTier, Ids, SlowTier

_KEPT_BYTES = 32 << 20  # of a thread's row buffer that stay allocated between batches


class _Plan(NamedTuple):
    """How a batch changes the cache, decided while the slow tier fetches its rows."""

    turn: int  # after which it was decided
    served: ServedRows
    changes: RowChanges


@dataclass
class _Found:
    """Where the ids of a batch were found: slots, as of a version and an epoch of the cache."""

    ids: Ids
    places: Hashed
    slots: Ids
    version: int
    epoch: int


class EmbeddingCache(nn.Module):
    """The forward pass of `nn.EmbeddingBag`, bit for bit, for rows stored in a slow tier.

    >>> import torch
    >>> from gati import evict
    >>> table = torch.arange(12.0).view(6, 2)
    >>> cache = evict.EmbeddingCache(evict.MemoryTier(table), rows=3, mode="sum")
    >>> cache(torch.tensor([[0, 5], [1, 1]]))
    tensor([[10., 12.],
            [ 4.,  6.]])

    Up to `rows` rows are cached, in hashed sets of 64. Each missing row of a batch is fetched once; then the
    policy decides which rows stay: `lru`, `laru` (which follows a predictor that learns when rows return), or
    `gati` (laru that falls back to lru if it does worse). With `rows=None`, the cache uses its share of
    `pool`.

    An `AskedTier` fetches rows concurrently while cached rows are copied and the policy learns from the batch
    and decides what stays.

    The cache is thread-safe. A lock is held while rows are looked up, copied and replaced, but not while rows
    are fetched or summed. If Ctrl-C or a lack of memory ends a replacement half-way, all rows are dropped.
    Results do not depend on the contents of the cache. Rows are constants without gradients; that of
    `padding_idx` adds nothing to a bag, and is never fetched. If a row changes in the slow tier, call
    `forget`. A cache can be neither copied nor pickled, and stays in a shared `pool`, with its rows, until
    `pool.leave(cache)`.
    """

    def __init__(
        self,
        slow: SlowTier,
        rows: int | None = None,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        policy: str = "gati",
        pool: PagePool | None = None,
        share: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Make an empty cache. Raises EvictError for an unknown mode or policy, or sizes that do not fit.

        A negative `padding_idx` counts from the end of the table.
        """
        super().__init__()
        if mode not in MODES:
            raise EvictError(f'mode is "{mode}"; choose one of {", ".join(MODES)}')
        if pool is None and rows is None:
            raise EvictError("give either rows, the capacity of the cache, or a pool")
        if rows is not None and rows < 1:
            raise EvictError(f"rows is {rows}; a cache holds at least 1")
        self.mode, self.include_last_offset = mode, include_last_offset
        self._slow = slow
        check_numbers(slow.dtype)
        self._asked = slow if isinstance(slow, AskedTier) else None
        self.padding_idx = padding_of(padding_idx, slow.rows)
        self._pool = own_pool(slow, rows) if pool is None else pool
        self._slab = RowSlab(self._pool, slow.width, slow.dtype)
        most = min(rows or slow.rows, slow.rows, self._pool.limit_pages * self._slab.page_rows)
        self._most = most
        self._sets = RowSets(most)
        self._policy = row_policy(policy, self._sets, most, seed=seed)
        self._where = np.full(len(self._sets.ids), -1, dtype=np.int64)  # position in the slab, by slot
        self._lock = threading.RLock()
        self._rooms = threading.local()
        self._version = 0  # changes with the cache's contents
        self._turn = 0  # grows with every batch that is served, and with the version
        self._epoch = 0  # grows when rows are forgotten
        self._clock = 0  # ids requested
        self._counts = {"batches": 0, "requested": 0, "hits": 0, "distinct": 0, "fetched": 0, "evicted": 0}
        if pool is None:
            self.allow(self._pool.limit_pages)  # not `join`: a pool keeps its users in memory
        else:
            pool.join(self, share=share)

    @property
    def slow(self) -> SlowTier:
        """The slow tier."""
        return self._slow

    @property
    def pages(self) -> int:
        """Number of pages it holds from the pool."""
        return self._slab.pages

    @property
    def capacity(self) -> int:
        """Current capacity in rows."""
        return int(self._sets.room.sum())

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one row per bag, [bags, width].

        `input` is [bags, ids], or [n] with `offsets` [bags], where each bag begins. `per_sample_weights`, of
        the shape of `input`, scale the rows of a sum, and keep their gradients.

        Raises EvictError, with nothing changed, for ids out of range, offsets that fall, weights that do not
        fit, and when the slow tier fails. While it fails, requests teach the policy when rows return, but
        neither the cache nor the guard changes.
        """
        # a trace would repeat the rows of this batch for ever
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise EvictError("an EmbeddingCache cannot be traced: use torch.compile instead")
        pooled = self._pooled
        if torch.compiler.is_compiling():  # it cannot trace threads, locks and NumPy
            pooled = torch.compiler.disable(pooled)
        return pooled(input, offsets, per_sample_weights)

    def _pooled(
        self,
        input: torch.Tensor,  # noqa: A002
        offsets: torch.Tensor | None,
        per_sample_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        flat = check_ids(input)
        check_offsets(input, offsets, include_last=self.include_last_offset)
        check_weights(input, per_sample_weights, self.mode, self.slow.dtype)
        check_range(flat.numpy(), self.slow.rows)
        weights = per_sample_weights
        if offsets is not None and len(offsets) == 0:  # no bags: torch may crash on ids that belong to none
            input, flat = input[:0], flat[:0]  # noqa: A001
            weights = None if weights is None else weights[:0]
        with torch.no_grad():
            rows, places = self._without_padding(flat.numpy())
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            rows = rows.clone()  # the gradient needs them, but the next batch overwrites the buffer
        return nn.functional.embedding_bag(
            torch.from_numpy(places).view_as(input),
            rows,
            None if offsets is None else offsets.to(torch.int64),
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=self.include_last_offset,
            padding_idx=None if self.padding_idx is None else len(rows) - 1,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises EvictError: its memory is mapped, and its slow tier may be a connection."""
        raise EvictError(
            "an EmbeddingCache can be neither copied nor pickled: make another one for the same slow tier"
        )

    def allow(self, pages: int) -> None:
        """Hold at most `pages` pages of the pool: surplus rows are evicted, and the others compacted."""
        with self._lock:
            try:
                pages = min(pages, -(-self._most // self._slab.page_rows))
                self._slab.grow(pages)
                kept = min(pages, self._slab.pages)
                self._sets.allow(min(kept * self._slab.page_rows, self._most))
                self._drop(self._policy.shrink())
                if kept < self._slab.pages:
                    held = np.flatnonzero(self._sets.ids >= 0)
                    self._where[held] = self._slab.shrink(kept, self._where[held])
                self._changed()
            except BaseException:
                self._drop_all()
                raise

    def forget(self, ids: torch.Tensor | None = None) -> None:
        """Drop rows that changed in the slow tier, by default all; running batches may still use them."""
        changed = None if ids is None else ids.numpy()
        with self._lock:
            try:
                held = np.flatnonzero(self._sets.ids >= 0)
                if changed is not None:
                    held = held[np.isin(self._sets.ids[held], changed)]
                self._sets.remove(held)
                self._drop(held)
                self._policy.forget(changed)
                self._changed()
                self._epoch += 1
            except BaseException:
                self._drop_all()
                raise

    def figures(self) -> Mapping[str, Any]:
        """Counts, as JSON values: ids requested, hits, distinct ids, rows fetched, rows evicted."""
        with self._lock:
            rates = {"hit_rate": self._counts["hits"] / max(self._counts["requested"], 1)}
            held = {"rows": int(self._sets.used.sum()), "capacity": self.capacity}
            return {**self._counts, **rates, **held, **self._policy.figures()}

    def _without_padding(self, ids: Ids) -> tuple[torch.Tensor, Ids]:
        """As `_rows`, for the ids of a batch; those of the padding have the index of the last row."""
        if self.padding_idx is None:
            return self._rows(distinct(ids))
        counts = ids != self.padding_idx
        rows, found = self._rows(distinct(ids[counts]))
        places = np.full(len(ids), len(rows) - 1)
        places[counts] = found
        return rows, places

    def _rows(self, asked: DistinctIds) -> tuple[torch.Tensor, Ids]:
        """Rows of the distinct ids and one of zeros, [n + 1, width], and the index of each id of the batch.

        Cached rows come first. The policy then decides which rows stay.
        """
        ids = asked.ids
        rows = self._room(len(ids) + 1)
        rows[-1] = 0.0
        if len(ids) == 0:
            return rows, asked.places
        found = self._find(ids)
        hits, missing = np.flatnonzero(found.slots >= 0), np.flatnonzero(found.slots < 0)
        waiting: Callable[[], None] | None = None
        plan: _Plan | None = None  # made only while a tier was asked: else other threads would void it
        if len(missing) and self._asked is not None:
            waiting = self._asked.ask(ids[missing], rows[len(hits) : -1])
        receive: Callable[[], None] = getattr(waiting, "receive", _nothing)  # after each step
        try:  # work that does not need the missing rows runs while the slow tier fetches them
            with self._lock:
                slots = self._slots_now(found)
                gone, hits = hits[slots[hits] < 0], hits[slots[hits] >= 0]
                self._slab.read(self._where[slots[hits]], rows[: len(hits)])
            receive()
            lacking = np.concatenate((gone, missing))
            row_of = np.empty(len(ids), dtype=np.int64)
            row_of[np.concatenate((hits, lacking))] = np.arange(len(ids))
            row_places = asked.spread(row_of)
            receive()
            with self._lock:
                begin, self._clock = self._clock, self._clock + len(row_places)
                last = begin + asked.last
                batch = RequestedRows(ids, found.places, asked.counts, last, begin, self._clock)
                batch = self._policy.observe(batch)
                if waiting is not None:
                    receive()
                    slots = self._slots_now(found)
                    served = self._policy.serve(batch, slots)
                    receive()
                    plan = _Plan(self._turn, served, self._policy.foresee(batch, slots, served))
        except BaseException:  # as by Ctrl-C, which an error of the tier must not replace
            if waiting is not None:
                with suppress(Exception):
                    waiting()  # until then, the tier writes to `rows`, which the next batch uses, too
            raise
        if waiting is not None:
            waiting()
        late = lacking if waiting is None else gone  # only now: a thread has one connection at a time
        if len(late):
            self._fetch(ids[late], rows[len(hits) : len(hits) + len(late)])
        with self._lock:
            try:
                self._count(batch, hits, len(lacking))
                changes = self._served(batch, found, plan)
                if found.epoch == self._epoch:
                    self._keep(batch, changes, rows, row_of)
                else:
                    self._policy.forget(ids[found.slots < 0])  # rows that may have changed are not kept
            except BaseException:
                self._drop_all()
                raise
        return rows, row_places

    def _find(self, ids: Ids) -> _Found:
        places = hashed(ids, self._sets.sets)
        with self._lock:
            return _Found(ids, places, self._sets.find(ids, places), self._version, self._epoch)

    def _slots_now(self, found: _Found) -> Ids:
        """Look the ids up again if the contents have changed since, as when another thread was served."""
        if found.version != self._version:
            found.slots, found.version = self._sets.find(found.ids, found.places), self._version
        return found.slots

    def _served(self, batch: RequestedRows, found: _Found, plan: _Plan | None) -> RowChanges:
        """Have the policy count a batch; returns what it replaces: the `plan`, if that still holds."""
        if plan is not None and plan.turn == self._turn:
            self._policy.commit(batch, plan.served)
            changes = plan.changes
        else:
            slots = self._slots_now(found)
            served = self._policy.serve(batch, slots)
            self._policy.commit(batch, served)
            changes = self._policy.plan(batch, slots, served.limits)
        self._turn += 1
        return changes

    def _room(self, count: int) -> torch.Tensor:
        """A buffer for rows [count, width], which the next batch of this thread overwrites.

        With a new buffer per batch, the system would have to clear memory each time.
        """
        kept: torch.Tensor | None = getattr(self._rooms, "rows", None)
        if kept is None or len(kept) < count:
            with torch.inference_mode(False):  # else later batches outside of it could not write to it
                size = count + count // 8, self.slow.width
                kept = torch.empty(size, dtype=self.slow.dtype, device="cpu")
            self._rooms.rows = kept if kept.nbytes <= _KEPT_BYTES else None
        return kept[:count]

    def _fetch(self, ids: Ids, out: torch.Tensor) -> None:
        found = self.slow.fetch(ids)
        if found.shape != out.shape or found.dtype != out.dtype:
            raise EvictError(
                f"the slow tier returned {tuple(found.shape)} {found.dtype} for {len(ids)} ids, not "
                f"{tuple(out.shape)} {out.dtype}"
            )
        one_by_row(out)[:] = one_by_row(found.cpu().contiguous())

    def _drop_all(self) -> None:
        """Drop all rows after a change that ended half-way, as by Ctrl-C: some would be wrong.

        Called from `except`, not from a context manager: Ctrl-C in the code of one would leave the lock held.
        """
        self._sets.clear()
        self._slab.clear()
        self._policy.forget()
        self._changed()
        self._epoch += 1

    def _keep(self, batch: RequestedRows, changes: RowChanges, rows: torch.Tensor, row_of: Ids) -> None:
        placed = self._policy.replace(batch, changes)
        if len(changes.leaving.slots) or len(placed):
            self._changed()
        self._drop(changes.leaving.slots)
        self._where[placed] = self._slab.put(rows, row_of[changes.kept])

    def _changed(self) -> None:
        """The contents changed: slots that were found before may be wrong, and so may plans."""
        self._version += 1
        self._turn += 1

    def _drop(self, slots: Ids) -> None:
        """The rows of emptied slots may be overwritten."""
        self._slab.free(self._where[slots])
        self._counts["evicted"] += len(slots)

    def _count(self, batch: RequestedRows, hits: Ids, fetched: int) -> None:
        counts = self._counts
        counts["batches"] += 1
        counts["requested"] += batch.end - batch.begin
        counts["hits"] += int(batch.counts[hits].sum())
        counts["distinct"] += len(batch.ids)
        counts["fetched"] += fetched


def _nothing() -> None:
    """Rows of other tiers are taken in all at once."""
