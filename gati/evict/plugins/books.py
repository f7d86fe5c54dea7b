"""The index of an engine's cache: the engine reports stored and dropped blocks, and asks for victims.

`BlockCache` serves a request in one step. An engine needs several: it looks up, makes room and stores, with
other requests in between. `EngineBooks` has these steps as separate calls, and makes the same decisions.

An engine may hold blocks without their prefix, which a prefix tree cannot represent. They are called strays
here, and are evicted as by LRU; the next request with their prefix adds them to the tree.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import compress
from numbers import Real  # NumPy's numbers, too
from threading import Thread
from typing import Any, cast

from gati.errors import TraceError
from gati.evict.cache import BlockCache, Serving
from gati.evict.index.tree import BlockRun, blocks_down_to
from gati.evict.learn.following import LearningLink
from gati.evict.policy.base import EvictionPolicy
from gati.evict.predict.conversing import HintedContinuation

_UNKNOWN = cast("int", object())  # a block for which an engine makes room without naming it


class EngineBooks(BlockCache):
    """The blocks that an engine holds, under the engine's names, and a policy that chooses victims.

    A block's name identifies it together with all blocks before it, like the chained hashes of engines. Not
    thread-safe.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy)
        self.link: LearningLink | None = None  # to a service
        self._run_of: dict[int, BlockRun] = {}
        self._pinned: Counter[int] = Counter()
        self._strays: OrderedDict[int, int] = OrderedDict()  # block to the last request that used it
        self._came: dict[int, None] = {}  # stored since the current request began
        self._serving: Serving | None = None
        self._left: dict[int, BlockRun] = {}  # victims since runs were last added, if blocks are independent
        self._conflicts = 0

    def __len__(self) -> int:
        """Number of blocks that the engine holds."""
        return len(self._run_of) + len(self._strays) + len(self._came)

    def __contains__(self, block: Hashable) -> bool:
        """Whether the engine holds a block."""
        return block in self._run_of or block in self._strays or block in self._came

    def begin(self, ids: Sequence[Hashable], time_s: float) -> int:
        """Begin a request for a path from the root; return how many of its leading blocks are held."""
        self.finish()
        path_ids = cast("list[int]", list(ids[: self.capacity]))
        try:
            path, hits = self._find(path_ids)
            self._tell(path_ids, hits, time_s)
            self._serving = self._begin(path_ids, path, hits, time_s)
        except TraceError:  # two blocks with one name: those that are cached age like strays
            self._conflicts += 1
            return 0
        return hits

    def hint(self, probability: Any) -> None:
        """Set the continuation probability for the next request; invalid values count as unknown."""
        if isinstance(self.predictor, HintedContinuation):
            known = isinstance(probability, Real) and not isinstance(probability, bool)
            self.predictor.hint(float(probability) if known and 0.0 <= probability <= 1.0 else math.nan)

    def stored(self, ids: Iterable[Hashable]) -> None:
        """Record that the engine holds these blocks now."""
        for block in cast("Iterable[int]", ids):
            if block not in self:
                self._came[block] = None

    def finish(self) -> None:
        """End the current request; it may be resumed."""
        serving, self._serving = self._serving, None
        if serving is None:
            self._stray_rest()
            return
        here = [block in self._came or block in self._strays for block in serving.missing]
        if self.tree.flat:
            loaded = list(compress(serving.missing, here))
        else:
            loaded = serving.missing[: here.index(False) if False in here else None]
        for block in loaded:
            self._came.pop(block, None)
            self._strays.pop(block, None)
        if not serving.counts:
            self.policy.resume(serving.ids, [block for run in serving.path for block in run.ids] + loaded)
        path = self._finish(serving, loaded)
        if self.predictor is not None and not serving.counts:
            for run in path[
                len(serving.path) :
            ]:  # without predictions of their own: copy those of the run above
                self.predictor.copy(serving.path[-1].slot, run.slot)
        if not self.tree.flat:
            self._astray(reversed(list(compress(serving.missing, here))[len(loaded) :]))
        self._stray_rest()

    def resume(self, ids: Sequence[Hashable], time_s: float) -> None:
        """Resume a request that was already counted.

        If no block of its path is cached, policy and predictor begin with it anew; the log has it already,
        unless the prompt was shorter than a block.
        """
        self.finish()
        path_ids = cast("list[int]", list(ids[: self.capacity]))
        try:
            path, hits = self._find(path_ids)
            if not path:
                self._serving = self._begin(path_ids, path, hits, time_s)
                return
        except TraceError:
            self._conflicts += 1
            return
        self._serving = Serving(path_ids, path, path_ids[hits:], self._requests, None, path[-1:], False)
        self._requests += 1
        path[-1].locks += 1
        self.policy.settle(path[-1])

    def victims(
        self, count: int, incoming: Sequence[Hashable] = (), spared: Collection[Hashable] = ()
    ) -> list[Hashable] | None:
        """Remove and return `count` blocks, or None, with nothing changed, if too few can be evicted.

        `incoming` are the blocks to make room for, as far as the engine knows; `spared` must stay.
        """
        kept = [block for block in cast("Collection[int]", spared) if block in self]
        for block in kept:
            self.pin(block)
        try:
            return cast("list[Hashable] | None", self._choose(count, cast("list[int]", list(incoming))))
        finally:
            for block in kept:
                self.unpin(block)

    def take_back(self, blocks: Iterable[Hashable]) -> None:
        """Hold victims again that the engine has kept; `blocks` are in the order in which they were chosen.

        Nothing was requested, so nothing counts, and predictions stay. To policies without predictions, the
        blocks were just used. For independent blocks only.
        """
        assert self.tree.flat
        kept = [block for block in cast("Iterable[int]", blocks) if block not in self]
        self.evicted -= len(kept)
        known = [(block, self._left[block]) for block in kept if block in self._left]
        self.policy.resume(kept, kept)  # LRU could not have evicted them, either
        # The slots that were freed last are taken first. So from the last victim on, no run takes the slot of
        # another one whose predictions are still to be copied.
        added = []
        for block, left in reversed(known):
            (run,) = self.tree.extend([], [block], self._requests)
            run.accesses = left.accesses
            if self.predictor is not None:
                self.predictor.copy(left.slot, run.slot)
            added.append(run)
        if added:
            self._entered(added)
            self.policy.touch(added, 0)
        self._astray(block for block in kept if block not in self._run_of)

    def close(self) -> None:
        """End the link to a service. Returns at once; pending entries of its log are written meanwhile."""
        link, self.link = self.link, None
        if link is not None:
            Thread(target=link.close, name="gati-closing", daemon=True).start()

    def limit(self, capacity: int) -> None:
        """From now on, the engine may hold so many blocks, at most the capacity that this was made with."""
        self.policy.limit(capacity)

    def pin(self, block: Hashable) -> None:
        """The engine uses a block: it must stay until it has been unpinned as often as pinned."""
        name = cast("int", block)
        self._pinned[name] += 1
        if self._pinned[name] == 1 and (run := self._run_of.get(name)) is not None:
            run.locks += 1
            self.policy.settle(run)

    def unpin(self, block: Hashable) -> None:
        """The engine no longer uses a block. Does nothing if it is not pinned."""
        name = cast("int", block)
        if name not in self._pinned:
            return
        self._pinned[name] -= 1
        if self._pinned[name] == 0:
            del self._pinned[name]
            if (run := self._run_of.get(name)) is not None:
                run.locks -= 1
                self.policy.settle(run)

    def forget(self, block: Hashable) -> None:
        """The engine dropped a block on its own. Blocks below it become strays."""
        name = cast("int", block)
        self._came.pop(name, None)
        if name in self._run_of:
            self.finish()
            self._prune(name)
        self._strays.pop(name, None)
        self._pinned.pop(name, None)

    def figures(self) -> Mapping[str, Any]:
        """Counts of the policy, of the predictor and of this index."""
        books = {"held": len(self), "strays": len(self._strays), "conflicts": self._conflicts}
        return {**super().figures(), **books}

    def _choose(self, count: int, incoming: list[int]) -> list[int] | None:
        free = [block for block in self._strays if block not in self._pinned]
        spare = self.tree.used - self._fixed()
        if count > spare + len(free):
            return None
        old = 0
        if free:
            limit = min((run.last for run in self.tree if not run.children and not run.locks), default=None)
            old = sum(limit is None or self._strays[block] <= limit for block in free)
        taken = free[: min(count, max(old, count - spare))]
        for block in taken:
            del self._strays[block]
        rest = count - len(taken)
        if rest > 0:
            unknown = [_UNKNOWN] * max(rest - len(incoming), 0)
            chosen = self.policy.evict(rest, unknown + incoming)
            left = {block: self._run_of.pop(block) for block in chosen}
            if self.tree.flat:
                self._left |= left
            taken += chosen
        self.evicted += len(taken)
        return taken

    def _fixed(self) -> int:
        """Number of blocks of the tree that cannot be evicted: in locked runs and their ancestors."""
        locked = [self._run_of[block] for block in self._pinned if block in self._run_of]
        if self._serving is not None:
            locked += self._serving.held
        return blocks_down_to(locked)

    def _prune(self, block: int) -> None:
        """Move a block and all blocks below it from the tree to the strays."""
        top = self._run_of[block]
        children: dict[BlockRun, list[BlockRun]] = {}
        for run in self.tree:
            if run.parent is not None:
                children.setdefault(run.parent, []).append(run)
        below = [top]
        for run in below:
            below += children.get(run, [])
        for run in reversed(below):
            count = len(run.ids) - (run.ids.index(block) if run is top else 0)
            for gone in reversed(self._remove(run, count)):
                self._strays[gone] = run.last

    def _remove(self, run: BlockRun, count: int) -> list[int]:
        """Remove the last blocks of a leaf, locked or not, from tree and policy."""
        run.locks, locks = 0, run.locks
        removed = self.policy.drop(run, count)
        for gone in removed:
            del self._run_of[gone]
        if run.ids:
            run.locks = locks - sum(gone in self._pinned for gone in removed)
            self.policy.settle(run)
        return removed

    def _stray_rest(self) -> None:
        self._astray(block for block in self._came if block not in self._strays)
        self._came.clear()

    def _astray(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._strays[block] = self._requests
            self._strays.move_to_end(block)

    def _split(self, upper: BlockRun, lower: BlockRun) -> None:
        for block in upper.ids:
            self._run_of[block] = upper
        if self._pinned:
            upper.locks = sum(block in self._pinned for block in upper.ids)
            lower.locks -= upper.locks
        super()._split(upper, lower)

    def _entered(self, added: list[BlockRun]) -> None:
        if added and self._left:
            self._left = {}  # others may have their slots now
        for run in added:
            for block in run.ids:
                self._run_of[block] = run
            run.locks = sum(block in self._pinned for block in run.ids) if self._pinned else 0
