"""The guard: never much worse than LRU, on any input. And `gati`, which is LARU with it.

A shadow LRU keeps keys only and sees every request. X is by how many blocks we have missed more than it, n
the blocks requested, A = eps n what is allowed. Predictions are followed until X >= A + B, then plain LRU
decides until X <= A. So X <= eps n + B + k + the longest request, always: after a switch each block that
only the shadow holds costs at most one miss.

Most of them are not requested again in time. For 4 k requested blocks after a prediction was wrong, they
therefore decide only while X + D/8 < A + B, where D counts the blocks that only the shadow holds, and after
LARU has caught one, while X + D/3 < A + B; LRU's evictions make D smaller. A prediction was wrong where the
block that it threw out returns before another that was there, and is still. Exact ones never are.

B blocks are much of a short trace, so that 0.006 n stands for A + B where that is less. Where X > A, what
predictions threw out has cost more than it saved: then it is 0.004 n, and X + D/3 counts however long ago one
was wrong. With exact predictions X <= 0 always.

Duels between LRU's choice and the predicted one show which is better. While predictions win nearly all of
them, none of these smaller limits holds; while they win clearly more than half, D/8 counts after a catch, too.
LARU's halving is undone while predictions have not lost anything lately, or only a twentieth of the cache
where they win nearly all duels or have saved half of the cache. A smaller lead says little: with one
prediction in five reversed they still win most duels, and cost more than they save.

After LRU has taken over, predictions that clearly win their duels are tried again, for B/4 misses more, as
long as X + D <= A + B + k. The bound stays: whatever we miss beyond LRU was one of these D, so that
X + D grows only by evictions that predictions chose.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

from gati.evict.index.tree import BlockRun, RunTree
from gati.evict.policy.duels import Duels
from gati.evict.policy.predicting import Laru
from gati.evict.predict.base import Predictor, grown

EXCESS_SHARE = 0.001  # eps
_MOST_SLACK = 384.0  # blocks
_RETURNING = 1.0 / 8.0  # of the blocks that only the shadow holds, those expected to be missed
_RETURNING_CAUGHT = 1.0 / 3.0  # the same once a prediction was caught in its phase
_LARGEST_SHARE = 0.006  # of n: what is allowed at most
_LARGEST_SHARE_LOSING = 0.004  # the same where predictions have cost more than they saved
_DOUBT = 4.0  # for how long one that was wrong counts, in capacities
_TRIAL = 0.25  # what may be missed when predictions are tried again, in B
_MEMORY = 0.5  # over how many requested blocks what was won fades, in capacities
_FORGIVEN = 0.05  # lost lately, in capacities, that does not count where predictions are trusted
_EARNED = 0.5  # as they are once they have saved this much, in capacities


def bound(requested: int, capacity: int, longest: int) -> float:
    """The most blocks that `gati` may ever have missed beyond LRU after `requested` blocks."""
    return EXCESS_SHARE * requested + slack(capacity) + capacity + longest


def slack(capacity: int) -> float:
    """By how many blocks X may exceed A before LRU takes over."""
    return min(capacity / 16.0, _MOST_SLACK)  # B


class ShadowLru:
    """The contents of an LRU cache: keys only."""

    def __init__(self, capacity: int, *, flat: bool = False) -> None:
        self._capacity = capacity
        self._tree = RunTree(flat=flat)
        self._order: OrderedDict[BlockRun, None] = OrderedDict()
        self.held: set[int] = set()  # all blocks
        self.left: list[int] = []  # those that the last request pushed out

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
        self.held.update(missing)
        self.left = []
        while tree.used > self._capacity:
            run = next(iter(order))
            taken = min(tree.used - self._capacity, len(run.ids))
            if taken == len(run.ids):
                del order[run]
            self.left += tree.trim(run, taken)[0]
        self.held.difference_update(self.left)
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
        self._asked = 0  # blocks of this request
        self._following = True
        self._limit: float | None = None  # X at which a trial ends, while there is one
        self._only: dict[int, float] = {}  # blocks that only the shadow holds, D of them: when each left us
        self._wrong_at = self._caught_at = -math.inf  # n when a prediction last was wrong, or was caught
        self._duels = Duels(capacity)
        self._named = np.zeros(64, dtype=bool)  # by slot: predictions named it in a duel since it was used
        self._alarms = self._trials = 0
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
        self._duels.requested(ids)
        self._seen += len(ids)
        self._excess += len(held) - hits
        self._served += 1
        if self._was_wrong(ids):
            self._wrong_at = self._seen
        for block in chain(self._shadow.left, ids):
            self._only.pop(block, None)
        self._asked = len(ids)
        self._judge()
        self._followed += self._following
        super().begin(ids, hits, time_s)
        fading = max(1.0 - len(ids) / (_MEMORY * self.capacity), 0.0)
        self._lately = fading * self._lately + len(held) - hits
        if self._forgiving():
            self._evicted.difference_update(ids)
            self._share = min(2.0 * self._share, 1.0)
        elif len(held) < len(ids):
            self._evicted.difference_update(set(ids).difference(held))

    def _forgiving(self) -> bool:
        """Whether LARU's mistakes do not count now."""
        trusted = self._duels.leading or self._excess <= -_EARNED * self.capacity
        return self._lately <= (_FORGIVEN * self.capacity if trusted else 0.0)

    def _judge(self) -> None:
        """Change sides where X, which counts this request, says so."""
        allowed = EXCESS_SHARE * self._seen
        if self._excess <= allowed:
            self._following, self._limit = True, None
        elif self._following:
            limit = allowed + slack(self.capacity) if self._limit is None else self._limit
            if self._excess >= limit or (self._limit is not None and not self._room()):
                self._following = False
                self._alarms += 1
                if self._limit is not None:
                    self._limit = None
                    self._duels.begin_again()
        elif self._duels.won and self._room():
            self._following = True
            self._trials += 1
            self._limit = self._excess + _TRIAL * slack(self.capacity)

    def _room(self) -> bool:
        """Whether X + D stays within A + B + k, whatever is evicted for this request."""
        most = EXCESS_SHARE * self._seen + slack(self.capacity) + self.capacity
        return self._excess + len(self._only) + self._asked <= most

    def _was_wrong(self, ids: list[int]) -> bool:
        """Whether something returns that left before a block that has not been used since, nor is now."""
        left = max((self._only[block] for block in ids if block in self._only), default=0.0)
        if left == 0.0:
            return False
        count = len(self._runs)
        return bool((self._recency[:count][self._leaf[:count]] < left).any())

    def _exposed(self) -> bool:
        """Whether predictions that were wrong may have thrown out too much that LRU still has."""
        if self._duels.leading:
            return False
        allowed = EXCESS_SHARE * self._seen
        most = allowed + slack(self.capacity)
        lately = self._seen - _DOUBT * self.capacity
        caught = self._caught_at >= lately and not self._duels.ahead
        share = _RETURNING_CAUGHT if caught else _RETURNING
        if self._excess > allowed and self._limit is None:
            share, most = _RETURNING_CAUGHT, min(most, _LARGEST_SHARE_LOSING * self._seen)
        elif self._wrong_at < lately:
            return False
        else:
            most = min(most, _LARGEST_SHARE * self._seen)
        return self._excess + share * len(self._only) >= most

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """LARU's choice; LRU's while the guard has stepped in, or what both hold differs too much."""
        self._duel()
        if self._following and not self._exposed():
            caught = self._caught
            removed = super().evict(count, missing)
            if self._caught > caught:
                self._wrong_at = self._caught_at = self._seen
        else:
            removed = []
            self._take(count, self._by_recency(), removed)
        self._only.update(dict.fromkeys(self._shadow.held.intersection(removed), float(self._clock)))
        return removed

    def drop(self, run: BlockRun, count: int) -> list[int]:
        """Remove blocks that an engine dropped by itself."""
        removed = super().drop(run, count)
        self._only.update(dict.fromkeys(self._shadow.held.intersection(removed), 0.0))  # no one's mistake
        return removed

    def touch(self, path: list[BlockRun], known: int) -> None:
        """What is used may be named in a duel again."""
        super().touch(path, known)
        for run in path:
            self._named[run.slot] = False

    def _enter(self, run: BlockRun) -> None:
        super()._enter(run)
        self._named = grown(self._named, run.slot + 1)
        self._named[run.slot] = False

    def _duel(self) -> None:
        """Name what LRU evicts next, and what predictions would, had they evicted what they named before."""
        count = len(self._runs)
        open_to_both = self._leaf[:count] & ~self._named[:count]
        if not open_to_both.any():
            return
        lru = int(np.where(self._leaf[:count], self._by_recency(), -np.inf).argmax())
        if self._named[lru]:  # there both agree
            return
        predicted = int(np.where(open_to_both, self._predicted(), -np.inf).argmax())
        runs = self._runs[lru], self._runs[predicted]
        if lru != predicted and runs[0] is not None and runs[1] is not None:
            self._named[predicted] = True
            self._duels.add(runs[0].ids[-1], runs[1].ids[-1])

    def figures(self) -> Mapping[str, Any]:
        """Those of LARU and the guard's."""
        return {
            **super().figures(),
            "guard": {
                "excess": self._excess,
                "allowance": EXCESS_SHARE * self._seen,
                "alarms": self._alarms,
                "trials": self._trials,
                "share_learned": self._followed / max(self._served, 1),
            },
        }
