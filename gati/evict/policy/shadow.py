"""What an LRU cache would hold now, for the guard of `gati` to compare with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import compress

from gati.evict.index.tree import BlockRun, RunTree


class ShadowLru:
    """The contents of an LRU cache: keys only."""

    def __init__(self, capacity: int, *, flat: bool = False) -> None:
        self._capacity = capacity
        self._tree = RunTree(flat=flat)
        self._order: OrderedDict[BlockRun, None] = OrderedDict()
        self.held: set[int] = set()  # all cached blocks
        self.left: list[int] = []  # those evicted by the last call
        self._gone: set[int] = set()  # cached blocks that it would not have, see `forget`

    def access(self, ids: list[int]) -> list[int]:
        """Serve a request; return its blocks that LRU has cached (in a tree, leading ones)."""
        tree, order = self._tree, self._order
        path, hits, upper, _ = tree.match(ids)
        if upper is not None:
            order[upper] = None
        held = [run.ids[0] for run in path] if tree.flat else ids[:hits]
        if self._gone:  # seldom
            there = [block not in self._gone for block in held]
            if not all(there):
                held = [*compress(held, there)] if tree.flat else held[: there.index(False)]
            self._gone.difference_update(ids)
        missing = tree.missing(ids, hits)
        if missing:
            path = path + tree.extend(path, missing, 0)
        for run in reversed(path):
            order[run] = None
            order.move_to_end(run)
        self.held.update(missing)
        self._trim()
        return held

    def forget(self, blocks: Iterable[int]) -> None:
        """LRU would not have these blocks, either: the engine dropped them, or locks made LRU evict them."""
        self._gone.update(self.held.intersection(blocks))

    def limit(self, capacity: int) -> None:
        """Change the capacity."""
        self._capacity = capacity
        self._trim()

    def _trim(self) -> None:
        tree, order = self._tree, self._order
        self.left = []
        while tree.used > self._capacity:
            run = next(iter(order))
            taken = min(tree.used - self._capacity, len(run.ids))
            if taken == len(run.ids):
                del order[run]
            self.left += tree.trim(run, taken)[0]
        self.held.difference_update(self.left)
        if self._gone:
            self._gone.difference_update(self.left)
