"""The policy `gati`: LARU with a guard that bounds, on any input, how many more blocks it misses than LRU.

A shadow LRU keeps keys only and sees every request. X is the number of blocks missed beyond the shadow, n the
number of requested blocks, A = eps n the allowance, k the capacity. Predictions decide until X >= A + B, then
LRU decides until X <= A. So X <= eps n + B + k + the longest request always holds: after a switch, each block
that only the shadow holds costs at most one miss.

Most of these blocks are not requested again in time. So for 4 k requested blocks after a wrong prediction,
predictions decide only while X + D/8 < A + B, where D is the number of blocks that only the shadow holds;
after LARU has caught one, only while X + D/3 < A + B. Evictions by LRU reduce D. A prediction was wrong if
the block that it evicted is requested again before another block that was cached then and still is. Exact
predictions are never wrong. In short traces, B is large compared with n, so the limit A + B is at most
0.006 n. If X > A, predictions have cost more than they saved: they decide only while X + D, with this
request, is at most 0.005 n. With exact predictions, X <= 0 always.

Duels between LRU's choice and the predicted one show which is better, even while LRU decides. They say
nothing of blocks that predictions keep in vain, since those are never evicted; blocks that were requested
when only one of the two caches had them do. While predictions win nearly all duels and have gained nearly
twice as many blocks as they lost, none of these smaller limits applies; while they win clearly more than
half, and have gained more than they lost, D/8 counts even after a catch. LARU's halving is undone while
predictions have lost nothing lately; if they are as clearly better, or have saved more than D/8, while they
have lost at most a twentieth of the cache.

At the beginning, up to n = 20,000, little is known and half a point is few blocks. Predictions are
tested before they evict anything: one is wrong, too, if a block is requested that was predicted later than
a cached one. After the first wrong one, predictions decide only while X + D, with this request, is at most
0.005 n. So X is at most 0.005 n, or what X + D was when the first was found wrong. The same limit applies
later while predictions lose more duels than they win. Without one found wrong they decide freely, as exact
ones must: see `docs/eviction.md` for what that may cost.

What was saved before does not pay for what is lost now: after a wrong prediction, LRU decides while more than
0.015 k blocks, and 100, were lost lately.

After LRU has taken over, predictions that clearly win their duels are tried again, for up to B/4 more misses,
as long as X + D <= A + B + k, and until they have gained, X + D <= 0.005 n. The bound still holds: every miss
beyond LRU was one of the D blocks, so X + D grows only by evictions that predictions chose.

The shadow knows of no locks, but requests that are active at the same time lock blocks, so that LRU, too,
must evict others earlier. A block that LRU evicts here although the shadow holds it, which happens for no
other reason, then leaves the shadow: D grows by no eviction of LRU, and the bound holds whatever is locked.
X leaves out the next miss of such a block. While predictions decide, X counts what they evict for locks, too.

Where blocks differ in cost, X, D and the blocks gained and lost are costs, in requested blocks of the mean
cost. Exact predictions then evict a block that is requested before another one only if it costs less, so
this is not wrong. The bound is one on costs: B, k and the longest request count as blocks of its last depth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gati.evict.index.tree import BlockRun, RunTree
from gati.evict.policy.base import Floats
from gati.evict.policy.duels import Duels, GainsAndLosses, faded
from gati.evict.policy.lru_only import LruOnly
from gati.evict.policy.shadow import ShadowLru
from gati.evict.policy.weighed import PathCosts, WeighedLaru
from gati.evict.predict.base import Predictor, grown

EXCESS_SHARE = 0.001  # eps
_MOST_SLACK = 384.0  # blocks
_RETURNING = 1.0 / 8.0  # expected share of misses among the blocks that only the shadow holds
_RETURNING_CAUGHT = 1.0 / 3.0  # the same after LARU caught a wrong prediction
_LARGEST_SHARE = 0.006  # limit on X, as a share of n
_BEGINNING = 20_000.0  # requested blocks, of which half a point is 100; the beginning ends there
_HALF_A_POINT = 0.005  # limit on X + D, as a share of n, unless predictions have shown that they save
_DOUBT = 4.0  # for how many requested blocks a wrong prediction counts, in capacities
_TRIAL = 0.25  # misses allowed when predictions are tried again, as a share of B
_MEMORY = 0.5  # over how many requested blocks gains fade, in capacities
_FORGIVEN = 0.05  # lost lately, in capacities, that does not count if predictions are trusted
_LOSING = 0.015  # lost lately, in capacities, from which LRU decides whatever was saved before
_LEAST_LOSING = 100.0  # the same in blocks, for small caches


def bound(requested: float, capacity: int, longest: int, cost_growth: float = 0.0) -> float:
    """Upper bound on the blocks that `gati` has missed beyond LRU after `requested` blocks.

    With `cost_growth`, both are costs, in first blocks of a path.
    """
    most = PathCosts(cost_growth).at(max(longest - 1, 0))
    return EXCESS_SHARE * requested + most * (slack(capacity) + capacity + longest)


def slack(capacity: int) -> float:
    """B, the number of blocks by which X may exceed A before LRU takes over."""
    return min(capacity / 16.0, _MOST_SLACK)


class Gati(WeighedLaru):
    """LARU and the guard: as good as the predictions, and never much worse than LRU.

    If LRU would have evicted a block too, that is no mistake of the predictions. `figures` has X and A, the
    number of times the guard stepped in, and the share of requests served by predictions.
    """

    name = "gati"

    def __init__(
        self,
        tree: RunTree,
        capacity: int,
        predictor: Predictor,
        *,
        seed: int = 0,
        cost_growth: float = 0.0,
    ) -> None:
        super().__init__(tree, capacity, predictor, seed=seed, cost_growth=cost_growth)
        self._shadow = ShadowLru(capacity, flat=tree.flat)
        self._behind = 0.0  # X as a cost
        self._lately = 0.0  # X of recent requests, with exponential decay
        self._seen = 0  # n
        self._seen_cost = 0.0
        self._asked = 0.0  # this request
        self._following = True
        self._limit: float | None = None  # X at which the current trial ends
        self._only = LruOnly()  # D
        self._above: dict[int, int] = {}  # by cached block: blocks above it, if costs differ
        self._wrong_at = self._caught_at = -math.inf  # n when a prediction was last wrong, or caught
        self._duels, self._outcomes = Duels(capacity), GainsAndLosses(capacity)
        self._named = np.zeros(64, dtype=bool)  # by slot: predictions named it in a duel since its last use
        self._scores: Floats | None = None
        # scores, and those of leaves until one of them is evicted
        self._compared: tuple[Floats, Floats] | None = None
        self._contradicted = False  # a prediction has been wrong since the start
        self._alarms = self._trials = 0
        self._served = self._followed = 0

    @property
    def excess(self) -> int:
        """X: blocks missed beyond LRU; negative if fewer were missed. With costs, blocks of the mean cost."""
        return round(self._excess)

    @property
    def _excess(self) -> float:
        return self._behind / self._mean

    @property
    def _at_stake(self) -> float:
        """D."""
        return self._only.cost / self._mean

    @property
    def _mean(self) -> float:
        """The mean cost of a requested block so far, in which all limits are counted."""
        return self._seen_cost / self._seen if self._costs.growth and self._seen else 1.0

    @property
    def following(self) -> bool:
        """Whether predictions decide."""
        return self._following

    def begin(self, ids: list[int], hits: int, time_s: float) -> None:
        """Compare with the shadow, and switch between predictions and LRU if X requires it."""
        held = self._shadow.access(ids)
        costs = self._costs
        self._seen += len(ids)
        self._seen_cost += costs.upto(len(ids))
        mean = self._mean
        self._duels.requested(ids, lambda place: costs.at(place) / mean)
        behind = costs.upto(len(held)) - costs.upto(hits)
        self._behind += behind
        self._served += 1
        if self._was_wrong(ids):
            self._wrong_at = self._seen
            self._contradicted = True
        elif hits > 0 and not self._contradicted and self._beginning():
            self._contradicted = self._misordered(ids, hits)
        self._only.discard(self._shadow.left)
        lost = self._only.discard(ids)
        self._outcomes.add(len(ids), gained=(lost - behind) / mean, lost=lost / mean)
        self._asked = costs.upto(len(ids)) / mean
        self._judge()
        self._followed += self._following
        super().begin(ids, hits, time_s)
        self._lately = faded(len(ids), _MEMORY * self.capacity) * self._lately + behind / mean
        if self._forgiving():
            self._evicted.difference_update(ids)
            self._share = min(2.0 * self._share, 1.0)
        elif len(held) < len(ids):
            self._evicted.difference_update(set(ids).difference(held))

    def resume(self, ids: list[int], held: list[int]) -> None:
        """LRU would store the same blocks; nothing was requested, so nothing counts."""
        super().resume(ids, held)
        self._shadow.access(held)
        self._only.discard(self._shadow.left)
        self._only.discard(held)

    def limit(self, capacity: int) -> None:
        """LRU would hold no more, either."""
        self._shadow.limit(capacity)
        self._only.discard(self._shadow.left)

    def _forgiving(self) -> bool:
        """Whether LARU's mistakes do not count now."""
        saved = self._excess + _RETURNING * self._at_stake <= 0.0 and not self._duels.behind
        return self._lately <= (_FORGIVEN * self.capacity if saved or self._leading() else 0.0)

    def _leading(self) -> bool:
        """Whether predictions are clearly better than LRU of late."""
        paying = self._outcomes.paying or (self._limit is None and self._outcomes.few)
        return self._duels.leading and paying

    def _judge(self) -> None:
        """Switch between predictions and LRU if X, which includes this request, requires it."""
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
        return self._excess + self._at_stake + self._asked <= most

    def _was_wrong(self, ids: list[int]) -> bool:
        """Whether a requested block was evicted, while one stayed, not used since, that costs no more."""
        queue = self._queue[: len(self._runs)]
        growth = self._costs.growth
        for evicted, cost in self._only.evictions(ids):
            stayed = queue[self._last_costs[: len(queue)] <= cost] if growth else queue
            if stayed.min(initial=np.inf) < evicted:
                return True
        return False

    def _beginning(self) -> bool:
        """Whether too few blocks were requested for predictions to have shown much."""
        return self._seen < _BEGINNING

    def _misordered(self, ids: list[int], hits: int) -> bool:
        """Whether a block that is requested now was predicted later than one that is not requested yet."""
        heads = self.tree.heads
        found = [heads[block].slot for block in ids[: None if self.tree.flat else hits] if block in heads]
        count = len(self._runs)
        scores = self._next_uses()
        if scores is None:
            return False
        others = scores[self._leaf[:count]]  # without the runs of this request, which are locked
        last = found if self.tree.flat else found[-1:]  # predictions for a path change along it
        return bool(len(others) and scores[last].max() > others.min())

    def _exposed(self) -> bool:
        """Whether wrong predictions may have evicted too many blocks that LRU still has."""
        allowed = EXCESS_SHARE * self._seen
        most = allowed + slack(self.capacity)
        lately = self._seen - _DOUBT * self.capacity
        half_a_point = min(most, _HALF_A_POINT * self._seen)
        at_worst = self._excess + self._at_stake + self._asked  # X, if all of D is requested
        if self._duels.behind or (self._contradicted and self._beginning()):
            return at_worst > half_a_point
        if self._wrong_at >= lately and self._lately > max(_LOSING * self.capacity, _LEAST_LOSING):
            return True
        if self._leading():
            return False
        if self._excess > allowed:
            return at_worst > half_a_point
        if self._wrong_at < lately:
            return False
        trusted = self._duels.ahead and self._outcomes.gaining
        share = _RETURNING_CAUGHT if self._caught_at >= lately and not trusted else _RETURNING
        return self._excess + share * self._at_stake >= min(most, _LARGEST_SHARE * self._seen)

    def evict(self, count: int, missing: list[int]) -> list[int]:
        """Evict as LARU; as LRU after the guard stepped in, or if the two caches differ too much."""
        self._duel()
        if self._following and not self._exposed():
            caught = self._caught
            removed = super().evict(count, missing)
            if self._caught > caught:
                self._wrong_at = self._caught_at = self._seen
            self._left(removed, float(self._clock))
        else:
            removed = []
            self._take(count, self._by_recency(), removed)
            self._left_lru(removed)
        self._scores = self._compared = None
        return removed

    def drop(self, run: BlockRun, count: int) -> list[int]:
        """Remove blocks that the engine dropped on its own."""
        removed = super().drop(run, count)
        self._left_lru(removed)
        return removed

    def _left_lru(self, removed: list[int]) -> None:
        """These blocks are not cached any more, and would not be by LRU, either."""
        for block in removed:
            self._above.pop(block, None)
        self._shadow.forget(removed)

    def _left(self, removed: list[int], clock: float) -> None:
        """These blocks are not cached any more, because predictions chose them."""
        held, costs, above = self._shadow.held, self._costs, self._above
        for block in removed:
            place = above.pop(block, 0)
            if block in held:
                self._only.add(block, clock, costs.at(place))

    def touch(self, path: list[BlockRun], known: int) -> None:
        """Used runs may be named in a duel again."""
        super().touch(path, known)
        if self._costs.growth:
            for run in path[known:]:
                self._above.update(zip(run.ids, range(run.start, run.end), strict=True))
        for run in path:
            self._named[run.slot] = False

    def _enter(self, run: BlockRun) -> None:
        super()._enter(run)
        self._named = grown(self._named, run.slot + 1)
        self._named[run.slot] = False

    def _predicted(self) -> Floats:
        """As the duel of this eviction has computed them, before the first block is evicted."""
        scores, self._scores = self._scores, None
        return super()._predicted() if scores is None else scores

    def _take(self, count: int, scores: Floats, removed: list[int], *, among: Floats | None = None) -> None:
        """What the duel has compared serves for the first blocks that are evicted after it."""
        compared, self._compared = self._compared, None
        if compared is not None and compared[0] is scores and not removed:
            among = compared[1]
        super()._take(count, scores, removed, among=among)

    def _duel(self) -> None:
        """Begin a duel between LRU's next victim and that of predictions, without victims named before."""
        count = len(self._runs)
        queue = self._queue[:count]
        lru = int(queue.argmin()) if count else 0
        if not count or queue[lru] == np.inf or self._named[lru]:  # no leaf, or both agree
            return
        self._scores = self._predicted()
        among = self._of_leaves(self._scores)
        self._compared = self._scores, among
        predicted = self._best(among)
        if self._named[predicted]:
            among = np.where(self._named[:count], -np.inf, among)
            predicted = self._best(among)
            if among[predicted] == -np.inf:
                return
        runs = self._runs[lru], self._runs[predicted]
        if lru != predicted and runs[0] is not None and runs[1] is not None:
            self._named[predicted] = True
            self._duels.add(runs[0].ids[-1], runs[1].ids[-1])

    def figures(self) -> Mapping[str, Any]:
        """The counts of LARU and of the guard."""
        return {
            **super().figures(),
            "guard": {
                "excess": self.excess,
                "allowance": EXCESS_SHARE * self._seen,
                "alarms": self._alarms,
                "trials": self._trials,
                "share_learned": self._followed / max(self._served, 1),
            },
        }
