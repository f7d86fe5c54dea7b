"""A cache of blocks: its contents, and one policy that decides what is evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gati.errors import EvictError, TraceError
from gati.evict.index.tree import DEPENDS, BlockRun, blocks_down_to
from gati.evict.policy.base import EvictionPolicy
from gati.evict.predict.base import Predictor


class ServedBlocks(NamedTuple):
    """The outcome of a request: blocks that were cached, and those evicted for the others."""

    hits: int
    evicted: list[int]


@dataclass
class Handle:
    """An active request: the blocks it matched are locked until it is released."""

    ids: list[int]
    hits: int
    locked: list[BlockRun]
    open: bool = True


class Serving(NamedTuple):
    """A request that has begun: the runs it matched, and the blocks still missing."""

    ids: list[int]
    path: list[BlockRun]
    missing: list[int]
    number: int
    ends: list[int] | None  # where on its path predictions change
    held: list[BlockRun]
    counts: bool = True  # False if it continues a request that was already counted


class BlockCache:
    """Serves requests from as many blocks of one size as its policy was made for.

    If a request is longer than the capacity, its first blocks are cached, and the others are misses.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.tree = policy.tree
        self.capacity = policy.capacity
        self.predictor = policy.predictor
        self.watch: Callable[[list[int], int, float], None] | None = None  # receives blocks, hits and time
        self.evicted = 0  # blocks, since the cache was made
        self._requests = 0
        self._locked: Counter[BlockRun] = Counter()  # by handles that are open

    def access(self, ids: list[int], time_s: float) -> ServedBlocks:
        """Serve a complete request. No other request may be active."""
        if len(ids) > self.capacity:
            ids = ids[: self.capacity]
        path, hits = self._find(ids)
        return ServedBlocks(hits, self._serve(ids, path, hits, time_s)[1])

    def match(self, ids: list[int]) -> Handle:
        """Find the cached blocks of a request and lock them.

        Raises TraceError, with nothing changed, if a block occurs twice or has another parent than before.
        """
        ids = list(ids[: self.capacity])
        path, hits = self._find(ids)
        if hits < len(ids) and len(set(ids)) < len(ids):  # a path that is cached has no block twice
            block = next(block for block, count in Counter(ids).items() if count > 1)
            raise TraceError(f"block {block} occurs twice in a request: {DEPENDS}")
        handle = Handle(ids, hits, [])
        self._hold(handle, path)
        return handle

    def insert(self, handle: Handle, time_s: float) -> list[int]:
        """Load the missing blocks of a matched request; return the evicted ones. The request stays locked.

        Raises EvictError, with nothing changed, if locked blocks leave too little room, and TraceError if a
        block had another parent in an earlier request, even if it is not cached any more.
        """
        if not handle.open:
            raise EvictError("this request was already released: match it again")
        ids = handle.ids
        path, hits = self._find(ids)  # other requests may have come in between
        count = self.tree.used + len(ids) - hits - self.capacity
        if count > 0 and (spare := self.tree.used - blocks_down_to([*path, *self._locked])) < count:
            raise EvictError(
                f"{count} blocks must be evicted, but only {spare} of {self.capacity} are not locked by "
                "active requests: release some, or make the cache larger"
            )
        self._drop(handle)
        try:
            path, evicted = self._serve(ids, path, hits, time_s)
        finally:
            self._hold(handle, path)
        return evicted

    def release(self, handle: Handle) -> None:
        """Unlock the blocks of a request, so that they can be evicted."""
        if handle.open:
            handle.open = False
            self._drop(handle)

    def figures(self) -> Mapping[str, Any]:
        """Counts of the policy and of the predictor, as JSON values."""
        predicted = {} if self.predictor is None else self.predictor.figures()
        return {**self.policy.figures(), **predicted}

    def _find(self, ids: list[int]) -> tuple[list[BlockRun], int]:
        path, hits, upper, lower = self.tree.match(ids)
        if upper is not None and lower is not None:
            self._split(upper, lower)
        return path, hits

    def _split(self, upper: BlockRun, lower: BlockRun) -> None:
        self.policy.split(upper, lower)
        if self.predictor is not None:
            self.predictor.copy(lower.slot, upper.slot)

    def _serve(
        self, ids: list[int], path: list[BlockRun], hits: int, time_s: float
    ) -> tuple[list[BlockRun], list[int]]:
        self._tell(ids, hits, time_s)
        serving = self._begin(ids, path, hits, time_s)
        count = self.tree.used + len(serving.missing) - self.capacity
        evicted = self.policy.evict(count, serving.missing) if count > 0 else []
        self.evicted += len(evicted)
        return self._finish(serving, serving.missing), evicted

    def _tell(self, ids: list[int], hits: int, time_s: float) -> None:
        if self.watch is not None:
            self.watch(ids, hits, time_s)

    def _begin(self, ids: list[int], path: list[BlockRun], hits: int, time_s: float) -> Serving:
        """Report a request to predictor and policy; its matched blocks stay locked until it is finished."""
        number = self._requests
        self._requests += 1
        ends = None if self.predictor is None else self.predictor.observe(ids, number, time_s)
        held = path if self.tree.flat else path[-1:]  # a lock on the deepest run also keeps those above it
        for run in held:
            run.locks += 1
            self.policy.settle(run)
        try:
            self.policy.begin(ids, hits, time_s)
        except Exception:  # such as TraceError: a policy may remember more blocks than are cached
            for run in held:
                run.locks -= 1
                self.policy.settle(run)
            raise
        return Serving(ids, path, self.tree.missing(ids, hits), number, ends, held)

    def _finish(self, serving: Serving, loaded: list[int]) -> list[BlockRun]:
        """Load the blocks `loaded`, and mark every run on the path as used by this request."""
        tree, policy, predictor = self.tree, self.policy, self.predictor
        path, ends = serving.path, serving.ends
        for run in serving.held:
            run.locks -= 1
        if ends is not None and not tree.flat:
            for upper, lower in tree.divide(path, ends):
                self._split(upper, lower)
        known = len(path)
        if loaded:
            room = (path[-1].end if path else 0) + len(loaded)
            cuts = ends if ends is None or tree.flat else [min(end, room) for end in ends]
            added = tree.extend(path, loaded, serving.number, cuts)
            self._entered(added)
            path = path + added
        for run in path:
            run.last = serving.number
        for run in path if serving.counts else path[known:]:
            run.accesses += 1
        policy.touch(path, known)
        for run in serving.held:
            policy.settle(run)
        if ends is not None and predictor is not None:
            _assign(predictor, path, ends, serving.ids, flat=tree.flat)
        return path

    def _entered(self, added: list[BlockRun]) -> None:
        """Called for runs that were just loaded."""

    def _hold(self, handle: Handle, path: list[BlockRun]) -> None:
        handle.locked = list(path) if self.tree.flat else path[-1:]
        for run in handle.locked:
            run.locks += 1
            self._locked[run] += 1
            self.policy.settle(run)

    def _drop(self, handle: Handle) -> None:
        for run in handle.locked:
            run.locks -= 1
            self._locked[run] -= 1
            if not self._locked[run]:
                del self._locked[run]
            self.policy.settle(run)
        handle.locked = []


def _assign(
    predictor: Predictor, path: list[BlockRun], ends: list[int], ids: list[int], *, flat: bool
) -> None:
    """Assign each run to the section of the request that it lies in."""
    if flat:
        place = {block: number for number, block in enumerate(ids)}
        for run in path:
            predictor.assign(run.slot, place[run.ids[0]])
        return
    stretch = 0
    for run in path:
        while ends[stretch] <= run.start:
            stretch += 1
        predictor.assign(run.slot, stretch)
