"""Bags that torch gets wrong, and gradients of weights."""

from __future__ import annotations

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
def test_gradients_of_weights_are_those_of_the_embedding_bag(dtype: torch.dtype, flat: bool) -> None:
    """Also if other batches are served before they are computed."""
    weight = table(dtype)
    reference = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum")
    cache = EmbeddingCache(MemoryTier(weight), 20, mode="sum")
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
