"""Pages of keys and values: which request uses which, which prefixes stay cached, which are evicted.

A page holds the keys and values of a few consecutive tokens in all layers. A page whose tokens are all known
has a name, a hash of all tokens up to its end. It stays cached after the request until the policy evicts it.
Pages in use are never evicted.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gati.errors import EvictError
from gati.evict.embed.pool import PagePool
from gati.evict.engine.decoder import DecoderSettings
from gati.evict.plugins.books import EngineBooks
from gati.evict.plugins.settings import PluginSettings
from gati.evict.policy.registry import policy_named


@dataclass(frozen=True)
class KeptPrefixes:
    """Settings that decide which prefixes stay cached. `reuse=False` caches none, for comparison.

    `gap_s` is the mean pause before a user's prompt in seconds, for `lpc` and `laru+lpc`. `service` is the
    folder of `gati evict serve`, which then fits the predictor; no step waits for it. Policies that do not
    predict reuse only log accesses there. `cost_growth` says by what share of a first page's time each page
    before it makes a page dearer to compute, so that `gati` saves time rather than pages; None follows from
    the network's sizes, and 0 counts pages.
    """

    policy: str = "gati"
    predictor: str = "reuse"
    gap_s: float = 100.0
    seed: int = 0
    reuse: bool = True
    service: str | None = None
    cost_growth: float | None = None

    @property
    def only_logs(self) -> bool:
        """Whether there is a service whose predictors the policy cannot use; accesses are logged there."""
        policy = policy_named(self.policy, flat=False)
        return self.service is not None and (policy.converses or not policy.predicts)

    def books(self, capacity: int, cost_growth: float = 0.0) -> EngineBooks:
        """The index of a cache of `capacity` pages; `cost_growth` is that of the network.

        Raises EvictError as `LiveCacheSettings` does.
        """
        growth = cost_growth if self.cost_growth is None else self.cost_growth
        return PluginSettings(self.policy, self.predictor, self.seed, self.gap_s, growth, self.service).books(
            capacity
        )


@dataclass(eq=False)
class PageTable:
    """The pages of a request in the order of its tokens; the first `len(names)` have these names."""

    names: Sequence[bytes]
    numbers: list[int]
    hits: int  # leading pages that were already computed at creation
    pages: torch.Tensor = field(init=False)  # the numbers, [p]

    def __post_init__(self) -> None:
        self.pages = torch.from_numpy(np.array(self.numbers, dtype=np.int64))  # faster than `torch.tensor`


def prefix_names(tokens: Sequence[int], page_tokens: int) -> list[bytes]:
    """Names of the whole pages of a sequence: each depends on all tokens up to the end of its page."""
    whole = len(tokens) // page_tokens * page_tokens
    content = np.asarray(tokens[:whole], dtype="<i4").tobytes()
    step = 4 * page_tokens
    names, name = [], b""
    for start in range(0, len(content), step):
        # SHA-256: a collision, even a deliberate one, would return the wrong prefix
        name = hashlib.sha256(name + content[start : start + step]).digest()
        names.append(name)
    return names


def page_bytes_for_tokens(settings: DecoderSettings, page_tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page for `page_tokens` tokens, rounded up to whole system pages."""
    numbers = settings.layers * 2 * page_tokens * settings.key_heads * settings.head_width
    needed = numbers * dtype.itemsize
    return -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE


class PrefixPages:
    """The engine's part of a pool. Not thread-safe."""

    def __init__(
        self,
        pool: PagePool,
        settings: DecoderSettings,
        kept: KeptPrefixes,
        *,
        page_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        """Starts without pages. Raises EvictError if the pool's pages are too small."""
        needed = page_bytes_for_tokens(settings, page_tokens, dtype)
        if pool.page_bytes < needed:
            raise EvictError(
                f"{page_tokens} tokens need {needed} bytes, but the pool's pages have {pool.page_bytes}; "
                "make the pool with larger pages, or use fewer tokens per page"
            )
        self.page_tokens = page_tokens
        self._pool = pool
        self._kept = kept
        shape = (settings.layers, 2, page_tokens, settings.key_heads, settings.head_width)
        rows = pool.bytes.view(pool.limit_pages, -1).view(dtype)
        # [pages, layers, 2, tokens, key heads, head width]
        self.cache = rows[:, : math.prod(shape)].unflatten(1, shape)
        self._held: list[int] = []
        self._free: list[int] = []
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._ready: set[int] = set()  # named pages that are computed, or will be before they are read
        self._uses: Counter[int] = Counter()
        self._unnamed = 0  # pages in use without a name
        # A policy's capacity cannot grow later, so it is the pool's limit.
        self._books = kept.books(pool.limit_pages, page_tokens * settings.cost_growth)
        self.counts = {"requested": 0, "hit": 0, "evicted": 0}

    @property
    def pages(self) -> int:
        """Number of pages held."""
        return len(self._held)

    @property
    def used(self) -> int:
        """Number of pages in use by requests."""
        return len(self._uses)

    @property
    def cached(self) -> int:
        """Number of cached pages that no request uses."""
        return sum(page not in self._uses for page in self._page_of.values())

    @property
    def spare(self) -> int:
        """Number of pages that could be returned to the pool now."""
        return len(self._held) - len(self._uses)

    def figures(self) -> Mapping[str, Any]:
        """Counts of the policy, of its predictor and of the books."""
        return self._books.figures()

    def unlink(self) -> None:
        """End the link to a service, if there is one; returns at once."""
        self._books.close()

    def surrender(self) -> None:
        """Forget everything, and return every page to the pool, even those in use."""
        self.unlink()
        for each in (self._free, self._page_of, self._name_of, self._ready, self._uses):
            each.clear()
        given, self._held, self._unnamed = self._held, [], 0
        self._pool.give(given)

    def hold(self, count: int) -> None:
        """Take pages from the pool, or return surplus ones. `count` must cover the pages in use."""
        if count > len(self._held):
            taken = self._pool.take(count - len(self._held))
            self._held += taken
            self._free += taken
            self._limit()
            return
        surplus = len(self._held) - count
        self._make_room(surplus, ())
        given = self._free[len(self._free) - surplus :]
        del self._free[len(self._free) - surplus :]
        gone = set(given)
        self._held = [page for page in self._held if page not in gone]
        self._pool.give(given)
        self._limit()

    def names(self, tokens: Sequence[int]) -> list[bytes]:
        """Names of the pages of these tokens; empty if prefixes are not cached."""
        return prefix_names(tokens, self.page_tokens) if self._kept.reuse else []

    def open(
        self, names: Sequence[bytes], total_tokens: int, time_s: float, goes_on: float | None = None
    ) -> PageTable | None:
        """Allocate pages for `total_tokens`, the first ones with these `names`, and count the request.

        Returns None, with nothing changed, if too many pages are in use.
        """
        found = self._leading(names)
        total = -(-total_tokens // self.page_tokens)
        unused = sum(self._page_of[name] not in self._uses for name in names[:found])
        if total - found > self.spare - unused:
            return None
        ready = self._leading_ready(names[:found])
        self._enter(names, found, total, time_s, goes_on)
        ids = [self._page_of[name] for name in names]
        ids += [self._free.pop() for _ in range(total - len(names))]
        self._uses.update(ids)
        self.counts["requested"] += len(names)
        self.counts["hit"] += ready
        return PageTable(names, ids, ready)

    def ready(self, names: Sequence[bytes]) -> int:
        """How many leading pages of these names are computed now."""
        return self._leading_ready(names[: self._leading(names)])

    def known(self, table: PageTable, tokens: int) -> int:
        """Number of computed leading tokens, at least `tokens`: other requests may have computed more."""
        page = tokens // self.page_tokens
        while page < len(table.names) and table.numbers[page] in self._ready:
            page += 1
        return max(tokens, page * self.page_tokens)

    def computed(self, table: PageTable, tokens: int) -> None:
        """Mark leading tokens as computed; they are, before another request reads them."""
        self._ready.update(table.numbers[: min(tokens // self.page_tokens, len(table.names))])

    def keep(
        self, table: PageTable, tokens: Sequence[int], time_s: float, goes_on: float | None = None
    ) -> None:
        """Name the pages of generated tokens, so that they are found when the conversation continues.

        `tokens` are all computed tokens; `goes_on` is as in `open`.
        """
        names = self.names(tokens)
        if len(names) <= len(table.names):
            return
        books = self._books
        for number in range(len(table.names), len(names)):
            name, page = names[number], table.numbers[number]
            if name not in self._page_of:  # otherwise, another request generated the same
                self._page_of[name], self._name_of[page] = page, name
                self._ready.add(page)
                self._unnamed -= 1
        self._limit()
        if not table.names:  # a prompt shorter than a page: `open` had nothing to begin with
            books.hint(goes_on)
        books.resume(names, time_s)
        books.stored(names)
        books.finish()

    def close(self, table: PageTable) -> None:
        """End the use of these pages by their request. Named pages that were never computed are dropped."""
        for page in table.numbers:
            self._uses[page] -= 1
            if not self._uses[page]:
                del self._uses[page]
                if page not in self._name_of:
                    self._free.append(page)
                    self._unnamed -= 1
        self._limit()
        if not table.names:
            return
        books = self._books
        books.unpin(table.names[-1])
        for name, page in zip(table.names, table.numbers, strict=False):
            if page not in self._ready and page not in self._uses:
                books.forget(name)
                self._drop(name)

    def _limit(self) -> None:
        """Tell the policy how many pages may have names, so that it compares itself with an equal cache."""
        self._books.limit(len(self._held) - self._unnamed)

    def _leading(self, names: Sequence[bytes]) -> int:
        return next((at for at, name in enumerate(names) if name not in self._page_of), len(names))

    def _leading_ready(self, names: Sequence[bytes]) -> int:
        ready = (self._page_of[name] in self._ready for name in names)
        return next((at for at, each in enumerate(ready) if not each), len(names))

    def _enter(
        self, names: Sequence[bytes], found: int, total: int, time_s: float, goes_on: float | None
    ) -> None:
        """Count a request in the index, evict for it, and assign pages to its missing names."""
        rest = names[found:]
        # a page stays here after one above it is dropped, which a cancelled request was to compute
        here = [name for name in rest if name in self._page_of]
        missing = [name for name in rest if name not in self._page_of]
        books = self._books
        locked = 0
        if names:
            books.hint(goes_on)
            locked = books.begin(names, time_s)  # until `finish`
        self._unnamed += total - len(names)
        self._limit()
        # once the page that they lacked is back, pages of the prefix are strays until `finish`, not locked
        self._make_room(total - found - len(here), missing, [*names[locked:found], *here])
        for name in missing:
            page = self._free.pop()
            self._page_of[name], self._name_of[page] = page, name
        if names:
            books.stored(missing)
            books.finish()
            books.pin(names[-1])  # and thereby all before it

    def _make_room(self, count: int, missing: Sequence[bytes], spared: Sequence[bytes] = ()) -> None:
        """Evict prefixes, but none of `spared`, until `count` pages are free. That many must be unused."""
        lack = count - len(self._free)
        if lack <= 0:
            return
        victims = self._books.victims(lack, missing, spared)
        if victims is None:
            raise AssertionError(f"{lack} pages must be evicted, but only {self.cached} are cached")
        for name in victims:
            assert isinstance(name, bytes)
            self._drop(name)
        self.counts["evicted"] += lack

    def _drop(self, name: bytes) -> None:
        page = self._page_of.pop(name)
        del self._name_of[page]
        self._ready.discard(page)
        self._free.append(page)
