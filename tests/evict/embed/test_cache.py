"""`EmbeddingCache` gives what `nn.EmbeddingBag` gives, to the bit, whatever is cached and whoever calls."""

from __future__ import annotations

import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import EvictError
from gati.evict.embed.cache import EmbeddingCache
from gati.evict.embed.policies import ROW_POLICIES
from gati.evict.embed.pool import PagePool
from gati.evict.embed.redis_tier import RedisTier
from gati.evict.embed.tiers import FileTier, Ids, MemoryTier
from tests.evict.embed.naive import NaiveLru
from tests.waiting import LONG_S

pytestmark = pytest.mark.slow

PAGE = 4096


def table(rows: int = 400, width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bag(weight: torch.Tensor, mode: str, **options: Any) -> torch.nn.EmbeddingBag:
    return torch.nn.EmbeddingBag.from_pretrained(weight, mode=mode, **options)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(
        ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
    )


def skewed(random: np.random.Generator, count: int, rows: int) -> torch.Tensor:
    return torch.from_numpy((random.random(count) ** 3 * rows).astype(np.int64))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 450),
    mode=st.sampled_from(["sum", "mean"]),
    policy=st.sampled_from(sorted(ROW_POLICIES)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    flat=st.booleans(),
    weighted=st.booleans(),
    include_last=st.booleans(),
    padding=st.sampled_from([None, 0, 2, -400]),
)
def test_equals_the_embedding_bag_bit_for_bit(
    seed: int,
    rows: int,
    mode: str,
    policy: str,
    dtype: torch.dtype,
    flat: bool,
    weighted: bool,
    include_last: bool,
    padding: int | None,
) -> None:
    random = np.random.default_rng(seed)
    weight = table(dtype=dtype)
    weight[7], weight[8, 0], weight[9, 0] = -0.0, float("nan"), float("inf")
    last = include_last and flat
    options: dict[str, Any] = {"mode": mode, "include_last_offset": last, "padding_idx": padding}
    reference = bag(weight, **options)
    cache = EmbeddingCache(MemoryTier(weight), rows, policy=policy, **options)
    for _ in range(6):
        bags, pooling = int(random.integers(1, 9)), int(random.integers(0 if flat else 1, 12))
        ids = skewed(random, bags * pooling, len(weight))
        offsets = None
        if flat:
            cuts = np.sort(random.integers(0, len(ids) + 1, bags - 1))
            ends = [len(ids)] if last else []
            offsets = torch.from_numpy(np.concatenate(([0], cuts, ends)).astype(np.int64))
        else:
            ids = ids.view(bags, pooling)
        weights = None
        if weighted and mode == "sum":
            weights = torch.from_numpy(random.standard_normal(tuple(ids.shape))).to(dtype)
        assert same_bits(cache(ids, offsets, weights), reference(ids, offsets, weights))
    assert cache.figures()["rows"] <= min(rows, len(weight))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    policy=st.sampled_from(sorted(ROW_POLICIES)),
    budgets=st.lists(st.integers(0, 12), min_size=4, max_size=12),
)
def test_results_stay_the_same_while_the_pool_shrinks_and_grows(
    seed: int, policy: str, budgets: list[int]
) -> None:
    random = np.random.default_rng(seed)
    weights = table(rows=2_000, width=64), table(rows=500, width=32, seed=1)
    bags = [bag(weight, "sum") for weight in weights]
    pool = PagePool(PAGE, 5 * PAGE, limit_bytes=12 * PAGE)
    caches = [
        EmbeddingCache(MemoryTier(weight), mode="sum", pool=pool, share=share, policy=policy)
        for weight, share in zip(weights, (2.0, 1.0), strict=True)
    ]
    for pages in budgets:
        pool.resize(pages * PAGE)
        assert pool.used_pages <= pages
        assert pool.used_pages == sum(cache.pages for cache in caches)
        for cache, weight, reference in zip(caches, weights, bags, strict=True):
            for _ in range(2):
                ids = skewed(random, 120, len(weight)).view(12, 10)
                assert same_bits(cache(ids), reference(ids))
            assert cache.figures()["rows"] <= cache.capacity <= cache.pages * (PAGE // (4 * weight.shape[1]))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small sums take much longer with several threads where other programs use the cores, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_ten_thousand_random_batches_are_equal_while_the_pool_shrinks_and_grows(one_thread: None) -> None:
    random = np.random.default_rng(0)
    weight = table(width=64)
    pool = PagePool(PAGE, 40 * PAGE, limit_bytes=60 * PAGE)
    caches = [
        EmbeddingCache(MemoryTier(weight), mode=mode, pool=pool, policy=policy)
        for policy in ROW_POLICIES
        for mode in ("sum", "mean")
    ]
    references = {mode: bag(weight, mode) for mode in ("sum", "mean")}
    for number in range(10_000):
        if number % 13 == 0:  # in turn before every cache
            pool.resize(int(random.integers(0, 61)) * PAGE)
        cache = caches[number % len(caches)]
        ids = skewed(random, int(random.integers(1, 40)), len(weight))
        cuts = np.sort(random.integers(0, len(ids) + 1, int(random.integers(0, 6))))
        offsets = torch.from_numpy(np.concatenate(([0], cuts)).astype(np.int64))
        assert same_bits(cache(ids, offsets), references[cache.mode](ids, offsets)), number


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 200))
def test_lru_keeps_what_lru_by_the_letter_keeps(seed: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    cache = EmbeddingCache(MemoryTier(table()), rows, policy="lru")
    sets = -(-rows // 64)
    naive = NaiveLru(sets, [rows // sets + (number < rows % sets) for number in range(sets)])
    lacking = 0
    for _ in range(12):
        ids = skewed(random, int(random.integers(1, 90)), 400)
        cache(ids.view(1, -1))
        lacking += naive.access(ids.tolist())
        assert cache.figures()["fetched"] == lacking


class Gate:
    """A slow tier that answers when it is told to."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.rows, self.width = weight.shape
        self.dtype = weight.dtype
        self.weight = weight
        self.asked, self.open = threading.Event(), threading.Event()

    def fetch(self, ids: Ids) -> torch.Tensor:
        rows = self.weight[torch.from_numpy(ids)]
        self.asked.set()
        assert self.open.wait(LONG_S)
        return rows


def test_threads_get_the_same_results_while_the_pool_is_resized() -> None:
    weight = table(rows=3_000, width=64)
    reference = bag(weight, "sum")
    pool = PagePool(PAGE, 8 * PAGE, limit_bytes=16 * PAGE)
    cache = EmbeddingCache(MemoryTier(weight), mode="sum", pool=pool, policy="lru")

    def serve(seed: int) -> bool:
        random = np.random.default_rng(seed)
        batches = [skewed(random, 200, 3_000).view(20, 10) for _ in range(40)]
        return all(same_bits(cache(ids), reference(ids)) for ids in batches)

    with ThreadPoolExecutor(4) as threads:
        served = [threads.submit(serve, seed) for seed in range(4)]
        for pages in [16, 0, 3, 12, 1, 7] * 5:
            pool.resize(pages * PAGE)
        assert all(each.result() for each in served)
    figures = cache.figures()
    assert (figures["batches"], figures["requested"]) == (160, 32_000)
    held = cache._sets.ids[cache._sets.ids >= 0]
    assert len(set(held.tolist())) == len(held) == figures["rows"]


def test_a_row_forgotten_while_it_is_fetched_is_not_kept() -> None:
    weight = table()
    slow = Gate(weight)
    cache = EmbeddingCache(slow, 100, mode="sum", policy="lru")
    ids = torch.tensor([[3]])
    with ThreadPoolExecutor(1) as threads:
        before = threads.submit(cache, ids)
        assert slow.asked.wait(LONG_S)
        old = weight[3].clone()
        weight[3] += 1.0
        cache.forget(torch.tensor([3]))
        slow.open.set()
        assert torch.equal(before.result()[0], old)
    assert torch.equal(cache(ids)[0], old + 1.0)


def test_two_threads_that_lack_one_row_keep_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Gate(table())
    cache = EmbeddingCache(slow, 100, mode="sum", policy="lru")
    decide, decided = cache._policy.plan, []
    monkeypatch.setattr(cache._policy, "plan", lambda *given: decided.append(given) or decide(*given))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache, torch.tensor([[3, 4]]))
        assert slow.asked.wait(LONG_S)
        slow.asked.clear()
        second = threads.submit(cache, torch.tensor([[3, 5]]))
        assert slow.asked.wait(LONG_S)  # the lock is not held while rows are fetched
        slow.open.set()
        first.result(), second.result()
    assert cache.figures()["rows"] == 3
    assert len(decided) == 2  # not in vain before rows are fetched: the other thread would void it


class Asked(MemoryTier):
    """A tier that fetches while the policy decides, with one connection for each thread.

    Once each, `at_once` happens in another thread when rows are asked for, `meanwhile` when they are awaited.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        self.at_once: Callable[[], object] = int
        self.meanwhile: Callable[[], object] = int
        self.fetched = 0
        self._busy: set[int] = set()  # threads that wait for an answer

    def fetch(self, ids: Ids) -> torch.Tensor:
        if threading.get_ident() in self._busy:
            raise EvictError("too many connections")
        self.fetched += len(ids)
        return super().fetch(ids)

    def ask(self, ids: Ids, out: torch.Tensor) -> Callable[[], None]:
        def wait() -> None:
            self._busy.remove(threading.get_ident())
            meanwhile, self.meanwhile = self.meanwhile, int
            _elsewhere(meanwhile)
            out[:] = self.fetch(ids)

        self._busy.add(threading.get_ident())
        at_once, self.at_once = self.at_once, int
        _elsewhere(at_once)
        return wait


def _elsewhere(happens: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as another:
        another.submit(happens).result()


@pytest.mark.parametrize("policy", ROW_POLICIES)
def test_it_decides_while_rows_are_fetched_as_it_would_afterwards(policy: str) -> None:
    random = np.random.default_rng(0)
    weight = table(rows=2_000)
    tiers = [MemoryTier(weight), Asked(weight)]
    before, during = (EmbeddingCache(slow, 300, mode="sum", policy=policy) for slow in tiers)
    for _ in range(60):
        ids = skewed(random, 400, 2_000).view(20, 20)
        assert same_bits(before(ids), during(ids))
        assert before.figures() == during.figures()


def test_rows_that_arrive_are_taken_in_between_the_steps_of_a_decision() -> None:
    steps: list[str] = []

    class Arriving:
        def receive(self) -> None:
            steps.append("received")

        def __call__(self) -> None:
            steps.append("waited")

    class Sending(MemoryTier):
        def ask(self, ids: Ids, out: torch.Tensor) -> Callable[[], None]:
            out[:] = self.fetch(ids)
            return Arriving()

    weight = table(rows=50)
    cache = EmbeddingCache(Sending(weight), 10, mode="sum")
    ids = torch.arange(20).view(2, 10)
    assert same_bits(cache(ids), bag(weight, "sum")(ids))
    assert steps == [*4 * ["received"], "waited"]


@pytest.mark.parametrize("when", ["at_once", "meanwhile"])
@pytest.mark.parametrize("policy", ROW_POLICIES)
def test_what_changes_while_rows_are_fetched_is_heeded(policy: str, when: str) -> None:
    """Also what is evicted before it was copied, and what changes after a decision."""
    random = np.random.default_rng(0)
    weight = table(rows=2_000, width=64)
    reference = bag(weight, "sum")
    slow = Asked(weight)
    pool = PagePool(PAGE, 8 * PAGE, limit_bytes=16 * PAGE)
    cache = EmbeddingCache(slow, mode="sum", pool=pool, policy=policy)
    for number in range(200):
        ids, others = (skewed(random, 200, 2_000).view(20, 10) for _ in range(2))
        changes: list[Callable[[], object]] = [
            lambda others=others: same_bits(cache(others), reference(others)),  # type: ignore[misc]
            lambda number=number: pool.resize(number % 17 * PAGE),  # type: ignore[misc]
            cache.forget,
            int,
        ]
        setattr(slow, when, changes[number % 4])
        assert same_bits(cache(ids), reference(ids))
        held = cache._sets.ids[cache._sets.ids >= 0]
        assert len(set(held.tolist())) == len(held) == cache.figures()["rows"] <= cache.capacity
        places = cache._where[cache._sets.ids >= 0]
        assert len(set(places.tolist())) == len(places)
        assert cache.figures()["fetched"] == slow.fetched


def test_rows_that_did_not_arrive_are_not_kept() -> None:
    random = np.random.default_rng(0)
    weight = table(rows=2_000)
    slow = Asked(weight)
    cache = EmbeddingCache(slow, 300, mode="sum")

    def fails() -> None:
        raise EvictError("away")

    for _ in range(40):
        ids = skewed(random, 400, 2_000).view(20, 20)
        rows = cache.figures()["rows"]
        slow.meanwhile = fails
        with pytest.raises(EvictError, match="away"):
            cache(ids)
        assert cache.figures()["rows"] == rows
        assert same_bits(cache(ids), bag(weight, "sum")(ids))
    assert cache.figures()["guard"]["excess"] <= cache.figures()["fetched"] // 50


class Failing(Gate):
    def fetch(self, ids: Ids) -> torch.Tensor:
        if 13 in ids:
            raise EvictError("no row 13")
        return super().fetch(ids)


def test_nothing_changes_where_the_slow_tier_fails() -> None:
    slow = Failing(table())
    slow.open.set()
    cache = EmbeddingCache(slow, 100, mode="sum")
    cache(torch.tensor([[1, 2]]))
    before = cache.figures()
    with pytest.raises(EvictError, match="no row 13"):
        cache(torch.tensor([[1, 13]]))
    assert cache.figures() == before


def test_no_rows_are_fetched_for_a_batch_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C was delayed by a slow file, and lost if the file could not be read."""
    cache = EmbeddingCache(Failing(table()), 100, mode="sum", policy="lru")

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._policy, "observe", stopped)
    with pytest.raises(KeyboardInterrupt):
        cache(torch.tensor([[13]]))


def test_a_slow_tier_that_returns_other_rows_is_named() -> None:
    slow = Gate(table())
    slow.open.set()
    slow.width = 9
    with pytest.raises(EvictError, match=r"returned \(1, 8\) torch.float32 for 1 ids, not \(1, 9\)"):
        EmbeddingCache(slow, 100)(torch.tensor([[1]]))


@pytest.mark.parametrize("width", [8, 1])
def test_a_slow_tier_may_return_rows_in_any_layout(width: int) -> None:
    weight = table(width=width).requires_grad_()

    class Columns(Gate):
        def fetch(self, ids: Ids) -> torch.Tensor:
            return self.weight.t()[:, torch.from_numpy(ids)].t()

    cache = EmbeddingCache(Columns(weight), 10, mode="sum")
    ids = torch.tensor([[1, 2], [399, 2]])
    assert same_bits(cache(ids), bag(weight.detach(), "sum")(ids))


@pytest.mark.parametrize("given_", [torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)])
def test_empty_bags_are_zero(given_: torch.Tensor) -> None:
    cache = EmbeddingCache(MemoryTier(table()), 10, mode="sum")
    offsets = torch.tensor([0, 0])
    assert torch.equal(cache(given_, offsets), bag(table(), "sum")(given_, offsets.to(given_.dtype)))


def test_rows_of_a_file_are_those_of_memory(tmp_path: object) -> None:
    weight = table(dtype=torch.float16)
    path = f"{tmp_path}/table.rows"
    FileTier.write(path, weight)
    slow = FileTier(path, width=8, dtype=torch.float16)
    assert (slow.rows, slow.width) == (400, 8)
    ids = skewed(np.random.default_rng(0), 300, 400).view(30, 10)
    cache = EmbeddingCache(slow, 50, mode="sum")
    for _ in range(3):
        assert same_bits(cache(ids), bag(weight, "sum")(ids))


def test_the_weights_of_a_linear_layer_are_a_table_of_one_column(tmp_path: Path) -> None:
    weight = torch.nn.Linear(400, 1).weight.t()
    assert torch.equal(FileTier.write(tmp_path / "table.rows", weight).fetch(np.arange(400)), weight)


@pytest.mark.parametrize(
    "write",
    [
        MemoryTier,
        lambda weight: FileTier.write("nowhere/table.rows", weight),
        lambda weight: RedisTier.write("redis://nowhere", "items", weight),
    ],
    ids=["memory", "file", "redis"],
)
@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(3),
        torch.ones(0, 4),
        torch.ones(3, 4, dtype=torch.int64),
        torch.ones(3, 4, device="meta"),
        np.ones((3, 4), dtype=np.float32),
    ],
)
def test_what_is_no_table_is_refused_before_anything_is_written(
    write: Callable[[Any], object], weight: Any
) -> None:
    with pytest.raises(
        EvictError, match=r"give a tensor \[rows, width\] of floating-point numbers on the CPU"
    ):
        write(weight)


ONE = torch.tensor([1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((torch.tensor([[1, 400]]),), r"id 400 at position 1 .* rows 0 to 399", id="too large"),
        pytest.param((torch.tensor([[-1, 4]]),), "id -1 at position 0", id="negative"),
        pytest.param((torch.tensor([[0.5]]),), "type torch.float32", id="numbers that are no ids"),
        pytest.param((ONE,), "needs offsets", id="no offsets"),
        pytest.param((ONE.view(1, 1), torch.tensor([0])), "2-d input", id="offsets of a 2-d input"),
        pytest.param((ONE, torch.tensor([0, 1, 0])), "decrease from 1 to 0 at position 2", id="offsets fall"),
        pytest.param((ONE, torch.tensor([1])), "begin with 1", id="first offset"),
        pytest.param((ONE, torch.tensor([0, 2])), "last offset is 2, .* 1 ids", id="last offset"),
        pytest.param((ONE, torch.tensor([0.0])), "offsets have shape", id="offsets that are no integers"),
        pytest.param((ONE, torch.tensor([0]), torch.ones(2)), r"shape \(2,\)", id="weights of another shape"),
        pytest.param((ONE, torch.tensor([0]), torch.ones(1).double()), "float64", id="weights' type"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(arguments: tuple[torch.Tensor, ...], message: str) -> None:
    cache = EmbeddingCache(MemoryTier(table()), 10, mode="sum")
    with pytest.raises(EvictError, match=message) as caught:
        cache(*arguments)
    assert "\n" not in str(caught.value)
    assert cache.figures()["batches"] == 0


@pytest.mark.parametrize("asked", [False, True])
def test_the_guard_compares_with_an_lru_that_forgot_the_same_rows(asked: bool) -> None:
    """Also if a row is forgotten while others are fetched, which are then not kept."""
    random = np.random.default_rng(0)
    slow = Asked(table()) if asked else MemoryTier(table())
    cache = EmbeddingCache(slow, 200, mode="sum", policy="gati")
    naive = NaiveLru(4, [50] * 4)
    lacking = 0
    for _ in range(150):
        ids = skewed(random, 60, 400)
        changed = skewed(random, 2, 400)
        held = {id_ for each in naive.held for id_ in each}
        lacking += naive.access(ids.tolist())
        if isinstance(slow, Asked) and random.random() < 0.1:
            slow.meanwhile = lambda changed=changed: cache.forget(changed)  # type: ignore[misc]
            naive.forget([id_ for id_ in ids.tolist() if id_ not in held])
            naive.forget(changed.tolist())
        cache(ids.view(1, -1))
        cache.forget(changed)
        naive.forget(changed.tolist())
    excess = cache.figures()["guard"]["excess"]
    assert abs(excess - (cache.figures()["fetched"] - lacking)) <= (5 if asked else 0)


def test_the_guard_compares_with_an_lru_whose_room_changes_between_batches() -> None:
    random = np.random.default_rng(0)
    pool = PagePool(PAGE, 16 * PAGE)
    cache = EmbeddingCache(MemoryTier(table(width=64)), mode="sum", policy="gati", pool=pool)  # 4 sets
    naive = NaiveLru(4, [64] * 4)
    lacking = 0
    for number in range(120):
        ids = skewed(random, 60, 400)
        lacking += naive.access(ids.tolist())
        cache(ids.view(1, -1))
        figures = cache.figures()
        assert figures["guard"]["excess"] == figures["fetched"] - lacking
        for pages in random.integers(0, 17, number % 4).tolist():
            pool.resize(pages * PAGE)
            naive.resize([cache.capacity // 4] * 4)


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    slow = MemoryTier(table())
    with pytest.raises(EvictError, match='mode is "max"; choose one of sum, mean'):
        EmbeddingCache(slow, 10, mode="max")
    with pytest.raises(EvictError, match="seed is -1; give a number from 0"):
        EmbeddingCache(slow, 10, seed=-1)
    with pytest.raises(EvictError, match="choose one of lru"):
        EmbeddingCache(slow, 10, policy="belady")
    with pytest.raises(EvictError, match="holds at least 1"):
        EmbeddingCache(slow, 0)
    with pytest.raises(EvictError, match="or a pool"):
        EmbeddingCache(slow)
    for dtype in (torch.int8, torch.float8_e5m2):
        with pytest.raises(
            EvictError, match=rf"are {dtype}, which cannot be summed; give one of torch\.float32"
        ):
            EmbeddingCache(Gate(table().to(dtype)), 10)
    with pytest.raises(EvictError, match='are for mode "sum"'):
        EmbeddingCache(slow, 10)(ONE.view(1, 1), None, torch.ones(1, 1))
    with pytest.raises(EvictError, match="not a multiple of the 12 bytes of a row"):
        EmbeddingCache(MemoryTier(table(width=3)), pool=PagePool(PAGE, PAGE))
    with pytest.raises(EvictError, match="cannot be read"):
        FileTier(f"{tmp_path}/nowhere", width=4)
    with pytest.raises(EvictError, match="cannot be read"):
        FileTier(tmp_path, width=1)  # a folder has a size, too
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EvictError, match="cannot be read"):
        FileTier(tmp_path / "pipe", width=1)  # without waiting for its writer
    with pytest.raises(EvictError, match="not a multiple of 12"):
        FileTier.write(f"{tmp_path}/rows", table())
        FileTier(f"{tmp_path}/rows", width=3)


@pytest.mark.parametrize("policy", sorted(ROW_POLICIES))
@pytest.mark.parametrize("made_inside", [False, True])
def test_it_may_serve_outside_of_inference_mode_what_it_first_served_inside(
    policy: str, made_inside: bool
) -> None:
    weight = table(rows=600, width=64)
    reference = bag(weight, "sum")
    random = np.random.default_rng(0)
    with torch.inference_mode(made_inside):
        pool = PagePool(PAGE, 8 * PAGE)
        cache = EmbeddingCache(MemoryTier(weight), mode="sum", pool=pool, policy=policy)
    for inside in (True, False, True, False):
        for size in (40, 90):
            ids = skewed(random, size, 600).view(-1, 10)
            with torch.inference_mode(inside):
                found = cache(ids)
            assert same_bits(found.clone(), reference(ids))
        with torch.inference_mode(not inside):
            pool.resize(4 * PAGE)
            pool.resize(8 * PAGE)
    weights = torch.ones(4, 10, requires_grad=True)
    assert same_bits(cache(ids[:4], per_sample_weights=weights), reference(ids[:4]))


class Allowed:
    """A user of a pool that only notes its limit."""

    pages = 0
    most = 0

    def allow(self, pages: int) -> None:
        self.most = pages


@pytest.mark.parametrize("shares", [(0.7,), (0.1, 0.2, 0.7), (1 / 3, 2 / 3), (1 / 49, 48 / 49), (0.1,) * 49])
def test_rounding_takes_no_page_from_a_users_share(shares: tuple[float, ...]) -> None:
    pool = PagePool(PAGE, 0, limit_bytes=490 * PAGE)
    users = [Allowed() for _ in shares]
    for user, share in zip(users, shares, strict=True):
        pool.join(user, share=share)
    whole = sum(Fraction(share).limit_denominator(1000) for share in shares)
    for pages in range(491):
        pool.resize(pages * PAGE)
        parts = [pages * Fraction(share).limit_denominator(1000) / whole for share in shares]
        assert [user.most for user in users] == [math.floor(part) for part in parts]


def test_a_pool_refuses_what_it_cannot_hold() -> None:
    pool = PagePool(PAGE, PAGE, limit_bytes=2 * PAGE)
    with pytest.raises(EvictError, match="limit of 8192"):
        pool.resize(3 * PAGE)
    with pytest.raises(EvictError, match="multiple of 4096"):
        PagePool(100, PAGE)
    with pytest.raises(EvictError, match="less than one page"):
        PagePool(PAGE, 10)
    cache = EmbeddingCache(MemoryTier(table()), pool=pool)
    with pytest.raises(EvictError, match="share is 0"):
        pool.join(cache, share=0.0)
    assert (cache.pages, pool.used_pages) == (1, 1)
    pool.leave(cache)
    assert (cache.pages, pool.used_pages) == (0, 0)


def test_the_default_device_of_the_program_does_not_matter() -> None:
    weight = table()
    ids = skewed(np.random.default_rng(0), 120, 400).view(12, 10)
    with torch.device("meta"):
        cache = EmbeddingCache(MemoryTier(weight), 50, mode="sum")
        found = cache(ids)
    assert same_bits(found, bag(weight, "sum")(ids))


def test_a_compiled_network_computes_the_same() -> None:
    random = np.random.default_rng(0)
    weight = table()
    reference = bag(weight, "sum")
    cache = EmbeddingCache(MemoryTier(weight), 50, mode="sum")
    network = torch.compile(torch.nn.Sequential(cache, torch.nn.ReLU()), backend="eager")
    for _ in range(4):
        ids = skewed(random, 120, 400).view(12, 10)
        assert same_bits(network(ids), reference(ids).relu())
        assert same_bits(torch.compile(cache, backend="eager")(ids), reference(ids))


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_trace_that_would_always_give_the_same_rows_is_refused() -> None:
    cache = EmbeddingCache(MemoryTier(table()), 50, mode="sum")
    with pytest.raises(EvictError, match=r"cannot be traced: .* torch\.compile"):
        torch.jit.trace(cache, torch.tensor([[1, 2]]))


@pytest.mark.parametrize("policy", ROW_POLICIES)
def test_its_memory_is_returned_as_soon_as_it_is_not_used(policy: str) -> None:
    cache = EmbeddingCache(MemoryTier(table()), 50, mode="sum", policy=policy)
    cache(torch.tensor([[1, 2]]))
    pool = weakref.ref(cache._pool)
    gc.disable()
    try:
        del cache
        assert pool() is None
    finally:
        gc.enable()


def test_ids_that_cannot_be_forgotten_change_nothing() -> None:
    cache = EmbeddingCache(MemoryTier(table()), 50, mode="sum")
    cache(torch.tensor([[1, 2]]))
    with pytest.raises(TypeError, match="meta"):
        cache.forget(torch.tensor([1], device="meta"))
    assert cache.figures()["rows"] == 2
