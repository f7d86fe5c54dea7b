"""A learned cache on disk: the same answers after loading, one line when the file is no cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gati.caches import (
    Companion,
    LearnedCache,
    Reading,
    expand_variants,
    load_cache,
    reads_input,
    register_predictor,
    save_cache,
    selector_names,
)
from gati.caches import predictors as registry
from gati.errors import LibraryError

EXITS = [each for each in expand_variants(["default", "published"]) if not reads_input(each)]


@pytest.mark.parametrize("variant", ["student(8)", *EXITS])
def test_a_loaded_cache_answers_bit_for_bit_like_the_saved_one(tmp_path: Path, variant: str) -> None:
    cache = LearnedCache(variant, (16, 8, 8), 10, "network")
    save_cache(tmp_path / "cache.safetensors", cache)
    loaded = load_cache(tmp_path / "cache.safetensors")
    hidden = torch.randn(5, 16, 8, 8)
    for before, after in zip(cache(hidden), loaded(hidden), strict=True):
        assert torch.equal(before, after)
    assert (loaded.variant, loaded.selector_name, loaded.hidden_shape) == (variant, "network", (16, 8, 8))
    assert loaded.memory_bytes == cache.memory_bytes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_loading_is_the_same_in_every_program(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whatever its default dtype and device are; and its random numbers stay what they would have been."""
    cache, hidden = LearnedCache("pyramid(8)", (16, 8, 8), 10, "network"), torch.randn(5, 16, 8, 8)
    save_cache(tmp_path / "cache.safetensors", cache)
    state, usual = torch.get_rng_state(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            loaded = load_cache(tmp_path / "cache.safetensors")
    finally:
        torch.set_default_dtype(usual)
    assert torch.equal(torch.get_rng_state(), state)
    for before, after in zip(cache(hidden), loaded(hidden), strict=True):
        assert torch.equal(before, after)


def test_a_companion_keeps_the_precisions_of_its_layers(tmp_path: Path) -> None:
    class Mixed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = super().forward(x.flatten(1).double()).float()
            return result

    x = torch.randn(4, 3, 2, 2)
    companion = Companion.of(Mixed(nn.Linear(12, 3).double()).eval(), Reading("logits"), x, tmp_path)
    cache = LearnedCache("companion(mixed)", (3, 2, 2), 3, "network", predictor=companion)
    save_cache(tmp_path / "cache.safetensors", cache)
    for before, after in zip(cache(x), load_cache(tmp_path / "cache.safetensors")(x), strict=True):
        assert torch.equal(before, after)


def test_layers_that_share_weights_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PREDICTORS", dict(registry._PREDICTORS))

    @register_predictor("tied")
    def tied(hidden_shape: tuple[int, ...], classes: int) -> nn.Module:
        first, second = nn.Linear(*hidden_shape, *hidden_shape), nn.Linear(*hidden_shape, *hidden_shape)
        second.weight = first.weight
        return nn.Sequential(first, nn.ReLU(), second, nn.Linear(*hidden_shape, classes))

    cache = LearnedCache("tied", (8,), 3, "margin")
    save_cache(tmp_path / "cache.safetensors", cache)
    hidden = torch.randn(5, 8)
    loaded = load_cache(tmp_path / "cache.safetensors")
    assert all(torch.equal(*pair) for pair in zip(loaded(hidden), cache(hidden), strict=True))


@pytest.mark.parametrize("selector", selector_names())
def test_a_lookup_gives_probabilities_and_a_score(selector: str) -> None:
    probabilities, score = LearnedCache("grid(8)", (6, 4, 4), 3, selector)(torch.randn(4, 6, 4, 4))
    torch.testing.assert_close(probabilities.sum(1), torch.ones(4))
    assert score.shape == (4,)


def test_a_cache_needs_no_gradients() -> None:
    cache = LearnedCache("conv(3,1)", (6, 4, 4), 3, "network")
    assert not cache.training
    assert not any(parameter.requires_grad for parameter in cache.parameters())


def test_files_that_are_no_cache_are_refused_in_one_line(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.zeros(3)}, foreign)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"\x01" * 40)
    for path in (foreign, damaged, tmp_path / "missing.safetensors"):
        with pytest.raises(LibraryError, match="is not a learned cache") as caught:
            load_cache(path)
        assert "\n" not in str(caught.value)


def test_a_cache_whose_weights_do_not_fit_its_architecture_is_refused(tmp_path: Path) -> None:
    cache = LearnedCache("grid(8)", (6, 4, 4), 3, "margin")
    cache.variant = "grid(16)"
    save_cache(tmp_path / "cache.safetensors", cache)
    with pytest.raises(LibraryError, match="is not a learned cache"):
        load_cache(tmp_path / "cache.safetensors")


@pytest.mark.parametrize(("then", "now"), [("pool(64)", "pool-linear(64)"), ("conv(3,1)", "conv2d(3,1)")])
def test_a_cache_stored_before_the_names_changed_loads_as_what_it_was(
    tmp_path: Path, then: str, now: str
) -> None:
    cache = LearnedCache(now, (16, 8, 8), 10, "margin")
    architecture = {"variant": then, "hidden_shape": [16, 8, 8], "classes": 10, "selector": "margin"}
    path = tmp_path / "old.safetensors"
    weights = {name: tensor.contiguous() for name, tensor in cache.state_dict().items()}
    save_file(weights, path, {"gati": json.dumps(architecture)})
    loaded = load_cache(path)
    hidden = torch.randn(5, 16, 8, 8)
    assert loaded.variant == now
    assert all(torch.equal(*pair) for pair in zip(loaded(hidden), cache(hidden), strict=True))
    save_cache(path, loaded)
    assert load_cache(path).variant == now
