"""Pages of memory that several caches share, within a byte budget that may change while they serve.

All pages lie in one address range of the size of the limit. Only pages that were written to use memory; it is
returned to the system with the page.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import torch

from gati.errors import EvictError

_ROUNDING = 1e-6  # of a page


class PageUser(Protocol):
    """A cache that stores its contents in pages of a pool."""

    @property
    def pages(self) -> int:
        """Number of pages it holds."""

    def allow(self, pages: int) -> None:
        """Hold at most `pages` pages from now on; return surplus pages to the pool before returning."""


class PagePool:
    """Hands out pages of `page_bytes`: at most `budget_bytes` in total, which never exceeds `limit_bytes`.

    Thread-safe. Each user may use its share of the budget.
    """

    def __init__(self, page_bytes: int, budget_bytes: int, *, limit_bytes: int | None = None) -> None:
        """Reserve addresses. Raises EvictError for inconsistent sizes."""
        limit_bytes = budget_bytes if limit_bytes is None else limit_bytes
        if page_bytes < mmap.PAGESIZE or page_bytes % mmap.PAGESIZE:
            raise EvictError(f"page_bytes is {page_bytes}: give a multiple of {mmap.PAGESIZE}")
        if limit_bytes < page_bytes:
            raise EvictError(f"limit_bytes is {limit_bytes}, less than one page of {page_bytes} bytes")
        self.page_bytes = page_bytes
        self.limit_pages = limit_bytes // page_bytes
        self._memory = mmap.mmap(-1, self.limit_pages * page_bytes, flags=mmap.MAP_PRIVATE)
        with torch.inference_mode(False):  # users may write outside of the mode that it is made in
            self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._free = list(range(self.limit_pages - 1, -1, -1))  # the last is taken first
        self._users: list[tuple[PageUser, float]] = []
        self._lock = threading.Lock()  # guards the free pages; no callback runs while it is held
        self._resizing = threading.RLock()  # acquired before the locks of users
        self._budget_pages = self._checked(budget_bytes)

    @property
    def budget_bytes(self) -> int:
        """The budget, in whole pages."""
        return self._budget_pages * self.page_bytes

    @property
    def used_pages(self) -> int:
        """Number of pages that users hold."""
        with self._lock:
            return self.limit_pages - len(self._free)

    def join(self, user: PageUser, *, share: float = 1.0) -> None:
        """Add a user, until it leaves; its part of the budget is `share` divided by the sum of all shares."""
        if not (share > 0.0 and math.isfinite(share)):
            raise EvictError(f"share is {share}: give a positive number")
        with self._resizing:
            self._users.append((user, share))
            self._divide()

    def leave(self, user: PageUser) -> None:
        """Remove a user, which returns all its pages; the others may use them."""
        with self._resizing:
            user.allow(0)
            self._users = [(other, share) for other, share in self._users if other is not user]
            self._divide()

    def resize(self, budget_bytes: int) -> None:
        """Change the budget; users return surplus pages before this returns.

        Raises EvictError beyond `limit_bytes`.
        """
        with self._resizing:
            self._budget_pages = self._checked(budget_bytes)
            self._divide()

    def take(self, count: int) -> list[int]:
        """Take up to `count` pages, fewer if no more are free. Users must stay within their limit."""
        count = max(count, 0)
        with self._lock:
            taken = self._free[max(len(self._free) - count, 0) :]
            del self._free[len(self._free) - len(taken) :]
        return taken[::-1]

    def give(self, pages: list[int]) -> None:
        """Return pages; their contents are lost."""
        for page, count in _runs(pages):
            self._memory.madvise(mmap.MADV_DONTNEED, page * self.page_bytes, count * self.page_bytes)
        with self._lock:
            self._free.extend(pages)

    def _checked(self, budget_bytes: int) -> int:
        pages = budget_bytes // self.page_bytes
        if not 0 <= pages <= self.limit_pages:
            raise EvictError(
                f"a budget of {budget_bytes} bytes is not between 0 and the pool's limit of "
                f"{self.limit_pages * self.page_bytes}: make the pool with a larger limit_bytes"
            )
        return pages

    def _divide(self) -> None:
        """Tell all users their limits; users that must return pages come first."""
        total = sum(share for _, share in self._users)
        # a page that is missing by rounding alone is given; far too little to exceed the budget
        allowed = [(user, int(self._budget_pages * share / total + _ROUNDING)) for user, share in self._users]
        for user, pages in allowed:
            user.allow(min(pages, user.pages))
        for user, pages in allowed:
            user.allow(pages)


def _runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """Stretches of neighbouring pages: the first, and how many."""
    ordered = sorted(pages)
    begins = [at for at, page in enumerate(ordered) if at == 0 or page != ordered[at - 1] + 1]
    for begin, end in pairwise([*begins, len(ordered)]):
        yield ordered[begin], end - begin
