"""The tree of runs is the tree of blocks, whatever is asked, loaded, locked and removed."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import EvictError, TraceError
from gati.evict.cache import BlockCache
from gati.evict.index.tree import BlockRun, RunTree
from gati.evict.plugins.books import EngineBooks
from gati.evict.policy.registry import POLICIES, make_policy
from gati.evict.predict.conversing import hinted
from gati.evict.prefix import PrefixCache
from tests.evict.naive import Scripted, build, tree_trace
from tests.evict.strategies import long_trees


def blocks_of(tree: RunTree) -> dict[int, int | None]:
    """Every block with its parent."""
    found: dict[int, int | None] = {}
    for run in tree:
        above = run.parent.ids[-1] if run.parent is not None else None
        for block in run.ids:
            found[block] = above
            above = block
    return found


def check(tree: RunTree) -> None:
    """What holds of every tree at every time."""
    runs = list(tree)
    assert tree.used == sum(len(run.ids) for run in runs)
    assert len({run.slot for run in runs}) == len(runs)
    assert all(run.slot < tree.slots for run in runs)
    for run in runs:
        assert tree.heads[run.ids[0]] is run
        assert run.children == sum(other.parent is run for other in runs)
        assert run.start == (0 if run.parent is None else run.parent.end)


@pytest.mark.slow
@given(long_trees, st.integers(0, 99), st.booleans())
@settings(max_examples=100, deadline=None)
def test_it_holds_the_blocks_a_naive_tree_holds(trace, seed: int, divided: bool) -> None:  # type: ignore[no-untyped-def]
    chance = random.Random(seed)
    tree = RunTree()
    naive: dict[int, int | None] = {}
    for number, row in enumerate(trace.requests):
        hits = next((place for place, block in enumerate(row) if block not in naive), len(row))
        path, matched, upper, lower = tree.match(row)
        assert matched == hits
        assert [block for run in path for block in run.ids] == row[:hits]
        assert (upper is None) == (lower is None)
        ends = sorted({*(chance.randint(1, len(row)) for _ in range(2)), len(row)})
        if divided:
            tree.divide(path, ends)
        if row[hits:]:
            path = path + tree.extend(path, row[hits:], number, ends if divided else None)
            naive.update(zip(row[hits:], [row[hits - 1] if hits else None, *row[hits:-1]], strict=True))
        assert [block for run in path for block in run.ids] == row
        if divided:
            assert all(end in {run.end for run in path} for end in ends)
        leaves = [run for run in tree if run.children == 0]
        for leaf in chance.sample(leaves, len(leaves) // 2):
            count = chance.randint(1, len(leaf.ids))
            removed, parent = tree.trim(leaf, count)
            assert parent is None or parent.children == 0
            for block in removed:
                del naive[block]
        assert blocks_of(tree) == naive
        check(tree)


def test_a_block_below_two_parents_is_no_tree() -> None:
    tree = RunTree()
    tree.extend([], [1, 2, 3], 0, (1, 3))
    with pytest.raises(
        TraceError, match="block 2 follows block 9, but earlier followed block 1: give every block"
    ):
        tree.extend([], [9], 1)
        tree.match([9, 2])


@pytest.mark.parametrize("policy", ["lru", "gati"])
@pytest.mark.parametrize("ids", [[1, 1], [7, 8, 8], [7, 9, 7], [7, 8, 9, 8]])
def test_a_block_that_occurs_twice_is_refused_before_anything_changes(policy: str, ids: list[int]) -> None:
    """The request itself was served, and a later one that was right raised an error."""
    cache = PrefixCache(8, policy, clock=lambda: 0.0)
    first = cache.match([7, 8])
    cache.insert(first)
    cache.release(first)
    with pytest.raises(TraceError, match="block . (occurs twice in a request|follows block .*): give every"):
        cache.match(ids)
    assert len(cache) == 2 and all(run.locks == 0 for run in cache._cache.tree)
    again = cache.match([7, 8, 9, 10])
    assert again.hits == 2 and cache.insert(again) == []


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=6, unique=True), min_size=2, max_size=30),
    st.sampled_from(["lru", "fpb", "laru+lpc"]),
)
@settings(max_examples=200, deadline=None)
def test_blocks_that_are_named_without_those_before_are_refused(requests: list[list[int]], name: str) -> None:
    """As by hashes of their own tokens alone: what was no tree failed later, with any request."""
    cache = PrefixCache(8, name)
    tree = cache._cache.tree
    paths: list[list[int]] = []
    for ids in requests:
        try:
            match = cache.match(ids)
        except TraceError as error:
            assert "give every block an identifier that depends on all blocks before it" in str(error)
            continue
        assert match.hits == 0 or any(ids[: match.hits] == path[: match.hits] for path in paths)
        with suppress(TraceError):
            cache.insert(match)
            paths.append(ids)
        cache.release(match)
        check(tree)


def test_a_block_of_an_earlier_request_is_named_as_such() -> None:
    """The refused request was said to have it."""
    cache = PrefixCache(8, "lru")
    for ids in ([1, 2, 3], [3]):
        cache.insert(cache.match(ids))
    with pytest.raises(TraceError) as raised:
        cache.match([1, 2, 4])
    said = "in earlier requests, block 3 follows block 2, but also began one: give"
    assert str(raised.value).startswith(said)


def test_a_request_that_the_policy_refuses_leaves_no_lock() -> None:
    """LRU still has a block that predictions have evicted, and knows another parent of it."""
    cache = PrefixCache(4, "laru+lpc", clock=lambda: 0.0)

    def served(ids: Sequence[Hashable], probability: float = 0.99) -> list[Hashable]:
        match = cache.match(ids)
        try:
            return cache.insert(match, hints={"continue": probability})
        finally:
            cache.release(match)

    for ids in (["C"], ["A"], ["A", "X"], ["B"]):
        assert served(ids, 0.01 if "X" in ids else 0.99) == []
    assert served(["D"]) == ["X"]
    match = cache.match(["B", "X"])
    with pytest.raises(TraceError, match="block X follows block B, but earlier followed block A"):
        cache.insert(match)
    assert [str(run.ids[0]) for run in cache._cache.tree if run.locks] == ["B"], "as long as it is under way"
    cache.release(match)
    assert all(run.locks == 0 for run in cache._cache.tree)
    # engines count it as a conflict
    books = EngineBooks(make_policy("laru+lpc", 4, hinted(100.0)))
    for ids in (["C"], ["A"], ["A", "X"], ["B"]):
        books.hint(0.01 if "X" in ids else 0.99)
        books.begin(ids, 0.0)
        books.stored(ids)
        books.finish()
    assert books.victims(1, ["D"]) == ["X"]
    assert books.begin(["B", "X"], 0.0) == 0
    assert books.figures()["conflicts"] == 1 and all(run.locks == 0 for run in books.tree)


TREE_POLICIES = [
    name for name, policy in POLICIES.items() if not (policy.flat_only or policy.converses)
]  # test_lpc.py has those that ask about conversations


@pytest.mark.parametrize("name", TREE_POLICIES)
def test_what_requests_under_way_need_stays(name: str) -> None:
    """Requests begin and end in any order; the blocks of those under way are never evicted."""
    chance = random.Random(name)
    rows = [[chance.randrange(3) for _ in range(chance.randint(1, 6))] for _ in range(300)]
    trace, capacity = tree_trace(rows), 20
    cache = build(name, capacity, lambda capacity, seed: Scripted(lambda number, block: float(block * 7 % 5)))
    open_ = []
    refused = 0
    for number, row in enumerate(trace.requests):
        handle = cache.match(row)
        needed = {block for other, _ in open_ for block in other.ids}
        before = blocks_of(cache.tree)
        try:
            evicted = cache.insert(handle, float(number))
        except EvictError:
            refused += 1
            assert blocks_of(cache.tree) == before, "nothing changes"
            cache.release(handle)
        else:
            assert not needed & set(evicted)
            open_.append((handle, number))
        check(cache.tree)
        while len(open_) > 5 or (open_ and chance.random() < 0.4):
            cache.release(open_.pop(chance.randrange(len(open_)))[0])
    for handle, _ in open_:
        cache.release(handle)
    assert all(run.locks == 0 for run in cache.tree)


def test_more_than_is_unlocked_cannot_leave_and_nothing_changes() -> None:
    cache = PrefixCache(4, "lru")
    first = cache.match([b"a", b"ab", b"abc"])
    assert cache.insert(first) == []
    second = cache.match([b"x", b"xy"])
    with pytest.raises(
        EvictError, match="1 blocks must be evicted, but only 0 of 4 are not locked by active requests"
    ):
        cache.insert(second)
    assert (len(cache), cache.match([b"a", b"ab", b"abc"]).hits) == (3, 3)


def test_an_engine_hears_what_to_free() -> None:
    cache = PrefixCache(4, "lru", clock=lambda: 0.0)
    for ids, evicted in (
        (["a", "ab", "abc"], []),
        (["x", "xy"], ["abc"]),
        (["a", "ab", "abd"], ["xy"]),
        (["a", "az"], ["x"]),
        (["q", "qr", "qrs", "qrst", "qrstu"], ["abd", "ab", "az", "a"]),
    ):
        match = cache.match(ids)
        assert sorted(cache.insert(match)) == sorted(evicted)
        cache.release(match)
        cache.release(match)
    assert cache.match(["q", "qr", "qrs", "qrst", "qrstu"]).hits == 4


def test_a_clock_may_be_set_back() -> None:
    """As `time.time` is: the predictor failed, and with it every request until then."""
    times = iter([1000.0, 900.0, 990.0, 1010.0])
    cache = PrefixCache(4, clock=lambda: next(times))
    for hits in (0, 2, 2, 2):
        match = cache.match([1, 2])
        assert match.hits == hits and cache.insert(match) == []
        cache.release(match)


def test_a_released_request_cannot_be_inserted() -> None:
    cache = PrefixCache(4, "lru")
    match = cache.match([1, 2])
    cache.release(match)
    with pytest.raises(EvictError, match="already released: match it again"):
        cache.insert(match)


@pytest.mark.parametrize("blocks", [0, -3])
def test_a_cache_of_nothing_is_refused(blocks: int) -> None:
    with pytest.raises(EvictError, match=f"blocks is {blocks}; give at least 1"):
        PrefixCache(blocks, "lru")


@pytest.mark.parametrize(("name", "instead"), [("opt-leaf", "gati"), ("lpc-oracle", "lpc")])
def test_policies_that_need_the_future_are_refused(name: str, instead: str) -> None:
    """One of them followed a predictor instead, under the name of a limit."""
    with pytest.raises(EvictError, match=f"{name} needs a whole trace in advance; use {instead}"):
        PrefixCache(8, name)


def test_the_deepest_run_keeps_those_above() -> None:
    tree = RunTree()
    policy = POLICIES["lru"](tree, 5)
    cache = BlockCache(policy)
    cache.access([1, 2, 3], 0.0)
    handle = cache.match([1, 2])
    cache.access([7, 8, 9], 1.0)
    assert isinstance(tree.heads[1], BlockRun)
    cache.release(handle)
    assert tree.match([1, 2, 3]).blocks == 2
