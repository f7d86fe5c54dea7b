"""The guard: never much worse than LRU, on any input. And `gati`, which is LARU with it.

A shadow LRU keeps keys only and sees every request. X is by how many blocks we have missed more than it, n
the blocks requested, A = eps n what is allowed. Predictions are followed until X >= A + B, then plain LRU
decides until X <= A. So X <= eps n + B + k + the longest request, always: after a switch each block that
only the shadow holds costs at most one miss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from gati.evict.index.tree import BlockRun, RunTree
from gati.evict.policy.predicting import Laru
from gati.evict.predict.base import Predictor

__all__ = ["EXCESS_SHARE", "Gati", "ShadowLru", "bound", "slack"]

EXCESS_SHARE = 0.001  # eps
_MOST_SLACK = 512.0  # blocks
_MEMORY = 0.5  # over how many requested blocks what was won fades, in capacities


def bound(requested: int, capacity: int, longest: int, *, excess_share: float = EXCESS_SHARE) -> float:
    """The most blocks that `gati` may ever have missed beyond LRU after `requested` blocks."""
    return excess_share * requested + slack(capacity) + capacity + longest


def slack(capacity: int) -> float:
    """By how many blocks X may exceed A before LRU takes over."""
    return min(capacity / 16.0, _MOST_SLACK)  # B


class ShadowLru:
    """The contents of an LRU cache: keys only."""

    def __init__(self, capacity: int, *, flat: bool = False) -> None:
        self._capacity = capacity
        self._tree = RunTree(flat=flat)
        self._order: OrderedDict[BlockRun, None] = OrderedDict()

    def access(self, ids: list[int], request: int = 0) -> list[int]:
        """Serve a request: those of its blocks that LRU has cached, in a tree the leading ones."""
        tree, order = self._tree, self._order
        path, hits, upper, _ = tree.match(ids)
        if upper is not None:
            order[upper] = None
        held = [run.ids[0] for run in path] if tree.flat else ids[:hits]
        missing = tree.missing(ids, hits)
        if missing:
            path = path + tree.extend(path, missing, request)
        for run in reversed(path):
            order[run] = None
            order.move_to_end(run)
        while tree.used > self._capacity:
            run = next(iter(order))
            taken = min(tree.used - self._capacity, len(run.ids))
            if taken == len(run.ids):
                del order[run]
            tree.trim(run, taken)
        return held


class Gati(Laru):
    """LARU and the guard: as good as the predictions, and never much worse than LRU.

    What LRU would not have kept either counts as no mistake of the predictions. `figures` tells X and A, how
    often the guard stepped in, and which share of the requests was served by predictions.
    """

    name = "gati"

    def __init__(self, tree: RunTree, capacity: int, predictor: Predictor, *, seed: int = 0) -> None:
        super().__init__(tree, capacity, predictor, seed=seed)
        self._shadow = ShadowLru(capacity, flat=tree.flat)
        self._excess = 0  # X
        self._lately = 0.0  # X of the last requests, older ones fading
        self._seen = 0  # n
        self._following = True
        self._alarms = 0
        self._served = self._followed = 0

    @property
    def excess(self) -> int:
        """X: blocks missed beyond LRU, negative where we missed fewer."""
        return self._excess

    @property
    def following(self) -> bool:
        """Whether predictions decide."""
        return self._following

    def begin(self, ids: list[int], hits: int, time_s: float) -> None:
        """Compare with the shadow; change sides where X says so."""
        held = self._shadow.access(ids)
        self._seen += len(ids)
        self._excess += len(held) - hits
        self._served += 1
        self._judge()
        self._followed += self._following
        super().begin(ids, hits, time_s)
        fading = max(1.0 - len(ids) / (_MEMORY * self.capacity), 0.0)
        self._lately = fading * self._lately + len(held) - hits
        if self._lately <= 0.0:
            self._evicted.difference_update(ids)
            self._share = min(2.0 * self._share, 1.0)
        elif len(held) < len(ids):
            self._evicted.difference_update(set(ids).difference(held))

    def _judge(self) -> None:
        allowed = EXCESS_SHARE * self._seen
        if self._following and self._excess >= allowed + slack(self.capacity):
            self._following = False
            self._alarms += 1
        elif not self._following and self._excess <= allowed:
            self._following = True

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """LARU's choice, or LRU's while the guard has stepped in."""
        if self._following:
            return super().evict(count, missing)
        removed: list[int] = []
        self._take(count, self._by_recency(), removed)
        return removed

    def figures(self) -> Mapping[str, Any]:
        """Those of LARU and the guard's."""
        return {
            **super().figures(),
            "guard": {
                "excess": self._excess,
                "allowance": EXCESS_SHARE * self._seen,
                "alarms": self._alarms,
                "share_learned": self._followed / max(self._served, 1),
            },
        }
