"""Selectors: what scores mean, and that a trained one is judged on inputs it has not seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gati.caches import (
    LearnedCache,
    build_selector,
    fit_selector_networks,
    load_cache,
    save_cache,
    selector_names,
)
from gati.caches.selectors import Margin, SelectorNetwork, fit_temperature, unsorted
from gati.errors import VariantError


def _sample(count: int = 600, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probabilities = (3 * torch.randn(count, 6, generator=generator)).softmax(1)
    chance = probabilities.amax(1)
    return probabilities, torch.rand(count, generator=generator) < chance


@pytest.mark.parametrize("name", selector_names())
def test_every_selector_gives_one_finite_score_an_input(name: str) -> None:
    probabilities = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.3, 0.3], [1 / 3, 1 / 3, 1 / 3]])
    score = build_selector(name, 3)(probabilities)
    assert score.shape == (3,)
    assert torch.isfinite(score).all()


@pytest.mark.parametrize("name", ["maximum-probability", "margin", "entropy"])
def test_plain_selectors_score_a_sure_predictor_above_an_unsure_one(name: str) -> None:
    score = build_selector(name, 3)(torch.tensor([[0.98, 0.01, 0.01], [0.5, 0.3, 0.2], [0.34, 0.33, 0.33]]))
    assert score[0] > score[1] > score[2]


def test_a_trained_network_ranks_agreement_about_as_well_as_the_true_chance() -> None:
    probabilities, agrees = _sample(2000)
    held_out = fit_selector_networks(probabilities, agrees, seed=1).held_out_scores
    top, bottom = held_out.topk(500).indices, (-held_out).topk(500).indices
    assert agrees[top].float().mean() > agrees[bottom].float().mean() + 0.2


def test_a_held_out_score_does_not_depend_on_its_own_answer() -> None:
    probabilities, agrees = _sample()
    before = fit_selector_networks(probabilities, agrees, seed=3, steps=30).held_out_scores
    flipped = agrees.clone()
    flipped[17] = ~flipped[17]
    after = fit_selector_networks(probabilities, flipped, seed=3, steps=30).held_out_scores
    assert after[17] == before[17]
    assert not torch.equal(after, before), "another input's score must have moved, or nothing was trained"


def test_fitting_is_the_same_twice() -> None:
    probabilities, agrees = _sample()
    first = fit_selector_networks(probabilities, agrees, seed=5, steps=20)
    second = fit_selector_networks(probabilities, agrees, seed=5, steps=20)
    assert torch.equal(first.held_out_scores, second.held_out_scores)
    assert torch.equal(first.network(probabilities), second.network(probabilities))


@pytest.mark.parametrize("truth", [0.5, 1.0, 2.5])
def test_the_fitted_temperature_is_the_one_the_answers_were_drawn_with(truth: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20_000, 5, generator=generator)
    answers = torch.multinomial((logits / truth).softmax(1), 1, generator=generator).squeeze(1)
    fitted = fit_temperature(logits.softmax(1), answers)
    assert float(fitted.temperature) == pytest.approx(truth, rel=0.06)
    chance = (logits / truth).softmax(1).amax(1)
    assert torch.allclose(fitted(logits.softmax(1)), chance, atol=0.02)


def test_a_fitted_temperature_is_saved_with_its_cache(tmp_path: Path) -> None:
    cache = LearnedCache("pool-linear(4)", (2, 4, 4), 3, "temperature-scaled")
    cache.selector.temperature.fill_(1.7)
    save_cache(tmp_path / "cache.safetensors", cache)
    loaded = load_cache(tmp_path / "cache.safetensors")
    hidden = torch.randn(5, 2, 4, 4)
    assert torch.equal(loaded(hidden)[1], cache(hidden)[1])


@pytest.mark.parametrize("classes", [2, 4, 10, 1000])
def test_without_sorting_a_network_gives_the_same_scores(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    network = SelectorNetwork(classes).eval().requires_grad_(False)
    network.class_bias.normal_(generator=generator)
    probabilities = (torch.randn(300, classes, generator=generator) * 4).softmax(1)
    probabilities[7] = torch.nan
    torch.testing.assert_close(unsorted(network)(probabilities), network(probabilities), equal_nan=True)
    assert unsorted(network).hidden.weight is network.hidden.weight
    assert isinstance(unsorted(margin := Margin()), Margin) and unsorted(margin) is margin


def test_an_unknown_selector_lists_the_known_ones() -> None:
    with pytest.raises(
        VariantError, match=r"unknown selector 'luck': choose one of maximum-probability, margin"
    ):
        build_selector("luck", 10)
