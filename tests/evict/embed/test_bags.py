"""Bags that torch gets wrong, padding, and gradients of weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from gati.errors import EvictError
from gati.evict.embed.cache import EmbeddingCache
from gati.evict.embed.tiers import MemoryTier

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def table(dtype: torch.dtype, rows: int = 50) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("offsets", [[0], [0, 2], [0, 2, 2]])
def test_ids_after_the_last_offset_are_refused(dtype: torch.dtype, mode: str, offsets: list[int]) -> None:
    """Of float64, torch sums them into the last bag, or crashes without one; of float32, means are wrong."""
    cache = EmbeddingCache(MemoryTier(table(dtype)), 20, mode=mode, include_last_offset=True)
    with pytest.raises(EvictError, match=rf"last offset is {offsets[-1]}, but the input has 6 ids: with"):
        cache(torch.arange(6), torch.tensor(offsets))
    assert cache.figures()["batches"] == 0


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_without_bags_nothing_is_fetched_and_nothing_returned(dtype: torch.dtype, weighted: bool) -> None:
    """With ids, torch writes outside of its memory if they are float64."""
    weights = torch.ones(2_000, dtype=dtype) if weighted else None
    cache = EmbeddingCache(MemoryTier(table(dtype)), 20, mode="sum")
    for _ in range(20):
        found = cache(torch.arange(2_000) % 50, torch.zeros(0, dtype=torch.int64), weights)
        assert found.shape == (0, 4) and found.dtype == dtype
    assert cache.figures()["fetched"] == 0
    last = EmbeddingCache(MemoryTier(table(dtype)), 20, mode="sum", include_last_offset=True)
    assert last(torch.zeros(0, dtype=torch.int64), torch.tensor([0])).shape == (0, 4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("padding", [None, 3])
def test_gradients_of_weights_are_those_of_the_embedding_bag(
    dtype: torch.dtype, flat: bool, padding: int | None
) -> None:
    """Also if other batches are served before they are computed."""
    weight = table(dtype)
    reference = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum", padding_idx=padding)
    cache = EmbeddingCache(MemoryTier(weight), 20, mode="sum", padding_idx=padding)
    source = torch.Generator().manual_seed(1)
    served = []
    for _ in range(3):
        ids = torch.randint(0, 50, (4, 6), generator=source)
        scales = torch.randn(4, 6, generator=source).to(dtype)
        offsets = None
        if flat:
            ids, scales, offsets = ids.view(-1), scales.view(-1), torch.tensor([0, 3, 3, 20])
        ours, theirs = scales.clone().requires_grad_(), scales.clone().requires_grad_()
        found, expected = cache(ids, offsets, ours), reference(ids, offsets, theirs)
        assert torch.equal(found, expected) and found.requires_grad
        served.append((found, expected, ours, theirs))
    for found, expected, ours, theirs in served:
        slope = torch.randn(found.shape, generator=source).to(dtype)
        found.backward(slope)
        expected.backward(slope)
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_padding_adds_nothing_and_is_not_fetched(mode: str) -> None:
    weight = table(torch.float32)
    weight[49] = float("nan")
    cache = EmbeddingCache(MemoryTier(weight), 20, mode=mode, padding_idx=-1)
    ids = torch.tensor([[3, 49, 7, 49], [49, 49, 49, 49], [1, 2, 3, 4]])
    reduced = {"sum": torch.sum, "mean": torch.mean}[mode]
    expected = torch.stack([reduced(weight[each], 0) for each in ([3, 7], [1, 2, 3, 4])])
    found = cache(ids)
    torch.testing.assert_close(found[[0, 2]], expected)
    assert torch.equal(found[1], torch.zeros(4))
    figures = cache.figures()
    assert (figures["requested"], figures["distinct"], figures["fetched"]) == (6, 5, 5)
    assert torch.equal(cache(torch.full((2, 3), 49)), torch.zeros(2, 4))
    assert cache.figures()["requested"] == 6


@pytest.mark.parametrize("padding", [50, -51])
def test_a_padding_that_is_no_row_is_refused(padding: int) -> None:
    with pytest.raises(EvictError, match=f"padding_idx is {padding}; the table has rows 0 to 49"):
        EmbeddingCache(MemoryTier(table(torch.float32)), 20, padding_idx=padding)


def test_bags_of_no_ids_need_offsets() -> None:
    """Torch says: step must be nonzero."""
    cache = EmbeddingCache(MemoryTier(table(torch.float32)), 20)
    with pytest.raises(EvictError, match="have no ids; give a 1-d input with offsets"):
        cache(torch.zeros((5, 0), dtype=torch.int64))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_with_what_to_do(copied: Callable[[torch.nn.Module], object]) -> None:
    model = torch.nn.Sequential(EmbeddingCache(MemoryTier(table(torch.float32)), 20))
    with pytest.raises(EvictError, match="neither copied nor pickled: make another one"):
        copied(model if copied is not copy.copy else model[0])


def test_gradients_of_weights_are_right() -> None:
    weight = table(torch.float64)
    cache = EmbeddingCache(MemoryTier(weight), 20, mode="sum")
    ids, offsets = torch.tensor([3, 7, 3, 49, 0]), torch.tensor([0, 2, 2])
    scales = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda each: cache(ids, offsets, each), (scales,))


def test_without_gradients_of_weights_results_have_none() -> None:
    cache = EmbeddingCache(MemoryTier(table(torch.float32).requires_grad_()), 20, mode="sum")
    ids, scales = torch.tensor([[1, 2]]), torch.ones(1, 2)
    assert not cache(ids, None, scales).requires_grad and not cache(ids).requires_grad
    with torch.no_grad():
        assert not cache(ids, None, scales.requires_grad_()).requires_grad
