"""Rows of one width in pages of a pool."""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch

from gati.errors import EvictError
from gati.evict.embed.pool import PagePool
from gati.evict.embed.tiers import Ids, SlowTier


def page_bytes_for(row_bytes: int) -> int:
    """Return the smallest number of bytes that is a multiple of rows and of system pages."""
    return math.lcm(row_bytes, mmap.PAGESIZE)


def own_pool(slow: SlowTier, rows: int | None) -> PagePool:
    """Make a pool for one cache of `rows` rows; None for all of them."""
    row_bytes = slow.width * slow.dtype.itemsize
    page_bytes = page_bytes_for(row_bytes)
    pages = -(-min(rows or slow.rows, slow.rows) * row_bytes // page_bytes)
    return PagePool(page_bytes, pages * page_bytes)


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
        with torch.inference_mode(False):  # rows may be written outside of the mode of whoever makes it
            self.rows = pool.bytes.view(dtype).view(-1, width)
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
        free = np.zeros(len(self.rows), dtype=np.bool_)
        free[self._rows_of(self._pages)] = True
        stays = free[used]
        free[used] = False
        (spare,) = free.nonzero()
        moved = used.copy()
        moved[~stays] = spare[: np.count_nonzero(~stays)]
        self.rows[torch.from_numpy(moved[~stays])] = self.rows[torch.from_numpy(used[~stays])]
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

    def put(self, rows: torch.Tensor) -> Ids:
        """Copy rows [n, width] to free positions, of which there must be enough; returns these."""
        begin = self._spare - len(rows)
        places = self._free[begin : self._spare].copy()
        self._spare = begin
        self.rows.index_copy_(0, torch.from_numpy(places), rows)
        return places

    def _hold(self, free: Ids) -> None:
        """Exactly these positions of the pages are free."""
        self._free = np.empty(len(self._pages) * self.page_rows, dtype=np.int64)
        self._free[: len(free)], self._spare = free, len(free)

    def _rows_of(self, pages: list[int]) -> Ids:
        first = np.array(pages, dtype=np.int64) * self.page_rows
        return (first[:, None] + np.arange(self.page_rows)).reshape(-1)
