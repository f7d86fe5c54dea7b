"""Caches of the same structure are traced once; each still answers with its own weights."""

from __future__ import annotations

import pytest
import torch

from gati.caches import LearnedCache, selector_names
from gati.engine.backends import segment_backend
from gati.model import flatten as flattening

SHAPE, CLASSES = (8, 6, 6), 4


def a_cache(seed: int, selector: str, variant: str = "pool-linear(64)") -> LearnedCache:
    torch.manual_seed(seed)
    cache = LearnedCache(variant, SHAPE, CLASSES, selector)
    for tensor in cache.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.05, 0.5)
    return cache


@pytest.mark.parametrize("selector", selector_names())
@pytest.mark.parametrize("variant", ["pool-linear(64)", "conv2d(3,1)", "pool(64)", "conv(3,1)"])
def test_a_second_cache_of_the_same_structure_is_not_traced(
    selector: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = 0
    lower = flattening.lower

    def counting(*arguments: object, **options: object) -> object:
        nonlocal traced
        traced += 1
        return lower(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(flattening, "lower", counting)
    monkeypatch.setattr(flattening, "_PROGRAMS", {})
    backend, hidden = segment_backend("torch"), torch.rand(3, *SHAPE)
    caches = [a_cache(seed, selector, variant) for seed in range(3)]
    with torch.inference_mode():
        lookups = [backend.lookup(cache, hidden) for cache in caches]
        for cache, lookup in zip(caches, lookups, strict=True):
            assert hasattr(lookup, "source"), "it was not flattened"
            for found, expected in zip(lookup(hidden), cache(hidden), strict=True):
                assert torch.equal(found, expected)
        assert not torch.equal(lookups[0](hidden)[0], lookups[1](hidden)[0])
    assert traced == 1
