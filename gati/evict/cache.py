"""A cache of blocks: what is held, and one policy that decides what leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gati.errors import EvictError
from gati.evict.index.tree import BlockRun, RunTree
from gati.evict.policy.base import EvictionPolicy
from gati.evict.predict.base import Predictor


class ServedBlocks(NamedTuple):
    """The outcome of a request: blocks that were cached, and those evicted for the others."""

    hits: int
    evicted: list[int]


@dataclass
class Handle:
    """A request under way: what it matched is locked until it is released."""

    ids: list[int]
    hits: int
    locked: list[BlockRun]
    open: bool = True


class Serving(NamedTuple):
    """A request that has begun: what it matched, and what it still lacks."""

    ids: list[int]
    path: list[BlockRun]
    missing: list[int]
    number: int
    ends: list[int] | None  # where on its path predictions change
    held: list[BlockRun]
    counts: bool = True  # or it continues a request that was counted before


class BlockCache:
    """Serves requests from `capacity` blocks of one size.

    Of a request that is longer than the capacity the first blocks are cached, the others are misses.
    """

    def __init__(
        self, tree: RunTree, capacity: int, policy: EvictionPolicy, predictor: Predictor | None = None
    ) -> None:
        self.tree = tree
        self.capacity = capacity
        self.policy = policy
        self.predictor = predictor
        self.watch: Callable[[list[int], int, float], None] | None = None  # is told blocks, hits and time
        self._requests = 0
        self._locked: Counter[BlockRun] = Counter()  # by handles that are open

    def access(self, ids: list[int], time_s: float) -> ServedBlocks:
        """Serve a request from begin to end, nothing else being under way."""
        if len(ids) > self.capacity:
            ids = ids[: self.capacity]
        path, hits = self._find(ids)
        return ServedBlocks(hits, self._serve(ids, path, hits, time_s)[1])

    def match(self, ids: list[int]) -> Handle:
        """Find what is cached of a request and lock it."""
        ids = list(ids[: self.capacity])
        path, hits = self._find(ids)
        handle = Handle(ids, hits, [])
        self._hold(handle, path)
        return handle

    def insert(self, handle: Handle, time_s: float) -> list[int]:
        """Load what is missing of a matched request, and return what had to leave. The request stays locked.

        Raises EvictError, with nothing changed, where what is locked leaves no room.
        """
        if not handle.open:
            raise EvictError("this request was already released: match it again")
        ids = handle.ids
        path, hits = self._find(ids)  # others may have come between
        count = self.tree.used + len(ids) - hits - self.capacity
        if count > 0 and (spare := self.tree.used - self._needed(path)) < count:
            raise EvictError(
                f"{count} blocks must be evicted, but only {spare} of {self.capacity} are not locked by "
                "active requests: release some, or make the cache larger"
            )
        self._drop(handle)
        path, evicted = self._serve(ids, path, hits, time_s)
        self._hold(handle, path)
        return evicted

    def release(self, handle: Handle) -> None:
        """Let the blocks of a request go when others need the room."""
        if handle.open:
            handle.open = False
            self._drop(handle)

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
        serving = self._begin(ids, path, hits, time_s)
        count = self.tree.used + len(serving.missing) - self.capacity
        evicted = self.policy.evict(count, serving.missing) if count > 0 else []
        return self._finish(serving, serving.missing), evicted

    def _begin(self, ids: list[int], path: list[BlockRun], hits: int, time_s: float) -> Serving:
        """Tell predictor and policy of a request; what it matched stays until it is finished."""
        number = self._requests
        self._requests += 1
        if self.watch is not None:
            self.watch(ids, hits, time_s)
        ends = None if self.predictor is None else self.predictor.observe(ids, number, time_s)
        held = path if self.tree.flat else path[-1:]  # the deepest run keeps those above it
        for run in held:
            run.locks += 1
            self.policy.settle(run)
        self.policy.begin(ids, hits, time_s)
        return Serving(ids, path, self.tree.missing(ids, hits), number, ends, held)

    def _finish(self, serving: Serving, loaded: list[int]) -> list[BlockRun]:
        """Load the first of what is missing, and count everything on the path as used just now."""
        tree, policy, predictor = self.tree, self.policy, self.predictor
        path, ends = serving.path, serving.ends
        for run in serving.held:
            run.locks -= 1
        if ends is not None and not tree.flat:
            for index, upper in tree.divide(path, ends):
                self._split(upper, path[index + 1])
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
        """These runs were loaded."""

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

    def _needed(self, path: list[BlockRun]) -> int:
        """Blocks that may not leave: those locked, of this path, and above either."""
        kept: set[BlockRun] = set(path)
        for locked in self._locked:
            run: BlockRun | None = locked
            while run is not None and run not in kept:
                kept.add(run)
                run = run.parent
        return sum(len(run.ids) for run in kept)


def _assign(
    predictor: Predictor, path: list[BlockRun], ends: list[int], ids: list[int], *, flat: bool
) -> None:
    """Tell the predictor in which stretch of the request each run lies."""
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
