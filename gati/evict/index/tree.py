"""The radix tree of a cache's contents: each node is a run of blocks with the same accesses.

A request of a thousand blocks touches a few runs, not a thousand nodes. If requests diverge within a run, it
is split. A run loses blocks only at its lower end; when its last block is removed, its parent may become a
leaf. The integer that names a block is unique to it (engines hash the whole prefix), so one dictionary maps a
block to the run that begins with it, and no run needs a table of children.

A flat cache is the same tree with runs of one block and without parents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gati.errors import TraceError

DEPENDS = "give every block an identifier that depends on all blocks before it"
NO_BLOCKS: list[int] = []  # shared by all removed runs; never modified


class BlockRun:
    """Consecutive blocks of a path, all accessed by the same requests since they were loaded.

    `slot` is its index in arrays that run parallel to the tree. `start` is the number of blocks above it;
    `end` also counts its own. `last` is the number of a request, `accesses` counts requests.
    """

    __slots__ = (
        "accesses",
        "children",
        "ids",
        "last",
        "locks",
        "parent",
        "slot",
        "start",
        "turns",
    )

    def __init__(self, slot: int, ids: list[int], parent: BlockRun | None, start: int, request: int) -> None:
        self.slot = slot
        self.ids = ids
        self.parent = parent
        self.start = start
        self.children = 0
        self.locks = 0
        self.accesses = 0
        self.last = request
        self.turns: int = 1 if parent is None else parent.turns + 1

    @property
    def end(self) -> int:
        """Number of blocks from the root to its last one."""
        return self.start + len(self.ids)

    def __repr__(self) -> str:
        return f"BlockRun({self.ids!r}, start={self.start}, last={self.last}, children={self.children})"


class Match(NamedTuple):
    """The cached runs of a path, from the root down, and their number of blocks."""

    path: list[BlockRun]
    blocks: int
    upper: BlockRun | None  # the new upper part of a run that had to be split
    lower: BlockRun | None  # its lower part


class RunTree:
    """The cached tree. `used` counts blocks; `slots` is one more than the largest slot ever assigned, and
    `free` lists slots to reuse.

    In a `flat` tree no block has a parent, and a match is any cached block of a request.
    """

    __slots__ = ("flat", "free", "heads", "slots", "used")

    def __init__(self, *, flat: bool = False) -> None:
        self.flat = flat
        self.heads: dict[int, BlockRun] = {}
        self.free: list[int] = []
        self.slots = 0
        self.used = 0

    def match(self, ids: Sequence[int]) -> Match:
        """Find the longest cached prefix; a partially matched run is split there.

        `ids` must be a list or a list slice. Raises TraceError if a block has another parent than before.
        """
        heads, path, at, count = self.heads, [], 0, len(ids)
        if self.flat:
            path = [heads[block] for block in ids if block in heads]
            return Match(path, len(path), None, None)
        parent: BlockRun | None = None
        while at < count:
            run = heads.get(ids[at])
            if run is None:
                break
            if run.parent is not parent:
                raise _no_tree(ids, at, _above(run))
            held = run.ids
            length = len(held)
            if held == ids[at : at + length]:
                path.append(run)
                parent = run
                at += length
                continue
            common = self._parting(run, ids, at)
            upper = self._split(run, common)
            path.append(upper)
            return Match(path, at + common, upper, run)
        self._check_new(ids, at)
        return Match(path, at, None, None)

    def missing(self, ids: list[int], matched: int) -> list[int]:
        """Blocks of a request that are not cached, after a match of `matched` blocks."""
        return [block for block in ids if block not in self.heads] if self.flat else ids[matched:]

    def add(self, ids: list[int], parent: BlockRun | None, request: int) -> BlockRun:
        """Add a new run of `ids`, none of them cached, below `parent`."""
        start = 0
        if parent is not None:
            parent.children += 1
            start = parent.start + len(parent.ids)
        run = BlockRun(self._slot(), ids, parent, start, request)
        self.heads[ids[0]] = run
        self.used += len(ids)
        return run

    def extend(
        self, path: list[BlockRun], missing: list[int], request: int, ends: Sequence[int] | None = None
    ) -> list[BlockRun]:
        """Load `missing` below the path of a match; return the new runs, topmost first.

        A run ends after each number of blocks in `ends`, counted from the root; surplus ends are ignored.
        """
        if self.flat:
            return [self.add([block], None, request) for block in missing]
        parent = path[-1] if path else None
        at = 0 if parent is None else parent.start + len(parent.ids)
        first, added = at, []
        for end in ends if ends is not None else (at + len(missing),):
            if end > at:
                parent = self.add(missing[at - first : end - first], parent, request)
                added.append(parent)
                at = end
        return added

    def divide(self, path: list[BlockRun], ends: Sequence[int]) -> list[tuple[BlockRun, BlockRun]]:
        """Split runs of `path`, in place, that have an end inside; returns (upper, lower part) of each.

        A run with several ends inside is split from the top: it is the lower part each time.
        """
        made = []
        at = 0
        for end in ends:
            while at < len(path) and path[at].start + len(path[at].ids) <= end:
                at += 1
            if at == len(path):
                break
            run = path[at]
            # blocks with two parents: predictions are for the whole run
            if run.start < end and run.ids[end - run.start] not in self.heads:
                upper = self._split(run, end - run.start)
                path.insert(at, upper)
                made.append((upper, run))
        return made

    def trim(self, run: BlockRun, count: int) -> tuple[list[int], BlockRun | None]:
        """Remove the last `count` blocks of a leaf, possibly all.

        Returns the removed blocks in path order, and the parent if it has become a leaf.
        """
        held = run.ids
        if count == len(held):
            return held, self.drop_leaf(run)
        self.used -= count
        removed = held[-count:]
        del held[-count:]
        return removed, None

    def drop_leaf(self, run: BlockRun) -> BlockRun | None:
        """Remove a leaf and clear its blocks; return its parent if that has become a leaf."""
        held = run.ids
        self.used -= len(held)
        del self.heads[held[0]]
        self.free.append(run.slot)
        run.ids = NO_BLOCKS
        parent = run.parent
        if parent is None:
            return None
        parent.children -= 1
        return None if parent.children else parent

    def __iter__(self) -> Iterator[BlockRun]:
        """Every run, in no particular order."""
        return iter(self.heads.values())

    def _slot(self) -> int:
        if self.free:
            return self.free.pop()
        self.slots += 1
        return self.slots - 1

    def _parting(self, run: BlockRun, ids: Sequence[int], at: int) -> int:
        """Number of blocks of a run that a request shares, from `at` on, before it goes another way.

        Raises TraceError if a block has another parent than before.
        """
        held = run.ids
        common = _common(held, ids, at)
        if held[:common] != ids[at : at + common]:  # they meet again, as in no tree
            apart = next(place for place in range(common) if held[place] != ids[at + place])
            place = next(place for place in range(apart, common) if held[place] == ids[at + place])
            raise _no_tree(ids, at + place, held[:place])
        if held[common] in self.heads:
            raise _no_tree(held, common, _above(self.heads[held[common]]), stored=True)
        self._check_new(ids, at + common)
        return common

    def _check_new(self, ids: Sequence[int], first: int) -> None:
        """Raise TraceError if one of these blocks, which no run above has, begins another run."""
        if self.heads.keys().isdisjoint(ids[first:]):
            return
        at = next(at for at in range(first, len(ids)) if ids[at] in self.heads)
        raise _no_tree(ids, at, _above(self.heads[ids[at]]))

    def _split(self, run: BlockRun, at: int) -> BlockRun:
        """Move the first `at` blocks of `run` into a new run above it."""
        upper = BlockRun(self._slot(), run.ids[:at], run.parent, run.start, run.last)
        upper.accesses, upper.turns = run.accesses, run.turns
        upper.children = 1  # locks stay with the lower part, and protect this one, too
        run.ids = run.ids[at:]
        run.parent = upper
        run.start += at
        self.heads[upper.ids[0]] = upper
        self.heads[run.ids[0]] = run
        return upper


def blocks_down_to(runs: Iterable[BlockRun]) -> int:
    """Number of blocks in these runs and in all runs above them."""
    found: set[BlockRun] = set()
    for each in runs:
        run: BlockRun | None = each
        while run is not None and run not in found:
            found.add(run)
            run = run.parent
    return sum(len(run.ids) for run in found)


def _common(held: list[int], ids: Sequence[int], at: int) -> int:
    """Length of the common prefix of `held` and `ids[at:]`; the first blocks are equal.

    In a tree, blocks differ everywhere after the first difference, so bisection finds it.
    """
    low, high = 1, min(len(held), len(ids) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if held[middle - 1] == ids[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _above(run: BlockRun) -> list[int]:
    return NO_BLOCKS if run.parent is None else run.parent.ids


def _no_tree(ids: Sequence[int], at: int, other: Sequence[int], *, stored: bool = False) -> TraceError:
    """The block at that place follows another one than `other`, or begins a request as it did not there.

    `other` is of an earlier request; `ids`, too, if they are `stored`.
    """
    before = f"follows block {ids[at - 1]}" if at else "begins a request"
    above = f"followed block {other[-1]}" if other else "began one"
    where, when = ("in earlier requests, ", "also") if stored else ("", "earlier")
    return TraceError(
        f"{where}block {ids[at]} {before}, but {when} {above}: {DEPENDS}, or treat the trace as flat (--flat)"
    )
