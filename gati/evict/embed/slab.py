"""Rows of one width in pages of a pool."""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.embed.pool import PagePool
from gati.evict.embed.tiers import Ids, SlowTier, bytes_of


def page_bytes_for(row_bytes: int) -> int:
    """Return the smallest number of bytes that is a multiple of rows and of system pages."""
    return math.lcm(row_bytes, mmap.PAGESIZE)


def own_pool(slow: SlowTier, rows: int | None) -> PagePool:
    """Make a pool for one cache of `rows` rows; None for all of them."""
    row_bytes = slow.width * slow.dtype.itemsize
    page_bytes = page_bytes_for(row_bytes)
    pages = -(-min(rows or slow.rows, slow.rows) * row_bytes // page_bytes)
    return PagePool(page_bytes, pages * page_bytes)


def one_by_row(rows: torch.Tensor) -> NDArray[np.void]:
    """A contiguous tensor of rows [n, width], n at least 1, as an array [n] with one item for each row.

    NumPy copies rows in the calling thread, as fast as one thread of torch does. Further threads of torch
    would wait for more work for a while after each copy, on cores that the slow tier may need.
    """
    content = bytes_of(rows)
    return content.view(np.dtype((np.void, content.shape[1])))[:, 0]


class RowSlab:
    """Positions for rows, numbered from the beginning of the pool. Not thread-safe."""

    def __init__(self, pool: PagePool, width: int, dtype: torch.dtype) -> None:
        row_bytes = width * dtype.itemsize
        if pool.page_bytes % row_bytes:
            raise EvictError(
                f"page_bytes is {pool.page_bytes}, not a multiple of the {row_bytes} bytes of a row: make "
                f"the pool with a multiple of {page_bytes_for(row_bytes)}"
            )
        self.pool = pool
        self.page_rows = pool.page_bytes // row_bytes
        self._rows = one_by_row(pool.bytes.view(-1, row_bytes))
        self._pages: list[int] = []
        self._free = np.zeros(0, dtype=np.int64)  # free positions first; has room for all
        self._spare = 0  # number of free positions

    @property
    def pages(self) -> int:
        """Number of pages held."""
        return len(self._pages)

    def grow(self, pages: int) -> None:
        """Take pages until `pages` are held, or no more are free."""
        taken = self.pool.take(pages - len(self._pages))
        self._pages += taken
        self._hold(np.concatenate((self._rows_of(taken), self._free[: self._spare])))

    def shrink(self, pages: int, used: Ids) -> Ids:
        """Give pages back until there are `pages`, and return where the `used` places went, [n].

        The rows in use must fit into what stays.
        """
        leave, self._pages = self._pages[pages:], self._pages[:pages]
        free = np.zeros(len(self._rows), dtype=np.bool_)
        free[self._rows_of(self._pages)] = True
        stays = free[used]
        free[used] = False
        (spare,) = free.nonzero()
        moved = used.copy()
        moved[~stays] = spare[: np.count_nonzero(~stays)]
        self._rows[moved[~stays]] = self._rows[used[~stays]]
        self._hold(spare[np.count_nonzero(~stays) :])
        self.pool.give(leave)
        return moved

    def clear(self) -> None:
        """Free all positions."""
        self._hold(self._rows_of(self._pages))

    def free(self, places: Ids) -> None:
        """Free positions for other rows."""
        end = self._spare + len(places)
        self._free[self._spare : end] = places
        self._spare = end

    def read(self, places: Ids, out: torch.Tensor) -> None:
        """Copy the rows at these positions to `out` [n, width]."""
        if len(places):
            self._rows.take(places, out=one_by_row(out), mode="clip")  # without an unnecessary copy

    def put(self, rows: torch.Tensor, which: Ids) -> Ids:
        """Copy rows [n, width] with these numbers to free positions, of which there must be enough.

        Returns the positions.
        """
        begin = self._spare - len(which)
        places = self._free[begin : self._spare].copy()
        self._spare = begin
        np.put(self._rows, places, one_by_row(rows).take(which))
        return places

    def _hold(self, free: Ids) -> None:
        """Exactly these positions of the pages are free."""
        self._free = np.empty(len(self._pages) * self.page_rows, dtype=np.int64)
        self._free[: len(free)], self._spare = free, len(free)

    def _rows_of(self, pages: list[int]) -> Ids:
        first = np.array(pages, dtype=np.int64) * self.page_rows
        return (first[:, None] + np.arange(self.page_rows)).reshape(-1)
