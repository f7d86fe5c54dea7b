"""Every registered family keeps the same contract, whatever the hidden output looks like."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

from gati.caches import (
    DEFAULT_VARIANTS,
    PUBLISHED_VARIANTS,
    build_predictor,
    expand_variants,
    feature_map,
    fold_normalisation,
    parse_variant,
    predictor_families,
    register_predictor,
)
from gati.caches import predictors as registry
from gati.caches.predictors import Builder
from gati.errors import VariantError

OURS = ("grid(256)", "pyramid(32)", "pool-linear(8192)", "pool-linear(4096)", "conv2d(3,1)", "conv2d(5,2)")
ALL = (*OURS, "pyramid(64)", *PUBLISHED_VARIANTS)
SHAPES = {
    "feature map": (16, 32, 32),
    "odd feature map": (24, 7, 5),
    "single pixel": (32, 1, 1),
    "large feature map": (8, 56, 56),
    "tokens": (17, 24),
    "one token": (1, 24),
    "vector": (48,),
}


@pytest.fixture(autouse=True)
def _restored_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PREDICTORS", dict(registry._PREDICTORS))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("variant", ALL)
def test_every_variant_reads_every_kind_of_hidden_output(variant: str, shape: tuple[int, ...]) -> None:
    predictor = build_predictor(variant, shape, classes=7)
    hidden = torch.randn(3, *shape)
    logits = predictor(hidden)
    assert logits.shape == (3, 7)
    assert torch.isfinite(logits).all()
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in predictor.parameters())


@pytest.mark.parametrize("variant", ALL)
def test_folding_normalisation_changes_no_answer(variant: str) -> None:
    torch.manual_seed(0)
    predictor = build_predictor(variant, (16, 16, 16), classes=5)
    for _ in range(3):
        predictor(torch.randn(8, 16, 16, 16) * 2 + 1)  # move the running statistics away from their start
    hidden = torch.randn(4, 16, 16, 16)
    predictor.eval()
    folded = fold_normalisation(predictor)
    torch.testing.assert_close(folded(hidden), predictor(hidden), rtol=1e-4, atol=1e-4)
    assert not any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in folded.modules())


class Skipping(nn.Sequential):
    """Runs its layers and adds the input."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden)


def test_a_sequence_with_a_forward_of_its_own_is_kept_as_it_is() -> None:
    block = Skipping(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    predictor = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), block, nn.Flatten(), nn.Linear(64, 5))
    hidden = torch.randn(3, 4, 4, 4)
    predictor(hidden)  # moves the running statistics
    folded = fold_normalisation(predictor)
    torch.testing.assert_close(folded(hidden), predictor.eval()(hidden), rtol=1e-4, atol=1e-4)
    assert len([layer for layer in folded.modules() if isinstance(layer, nn.BatchNorm2d)]) == 1


class Tokens(nn.Module):
    """Maps -> tokens."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.flatten(2)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6, track_running_stats=False)),
        (Tokens(), nn.Linear(16, 5), nn.BatchNorm1d(4)),
    ],
    ids=["statistics of the batch", "of tokens"],
)
def test_normalisation_that_cannot_be_folded_stays(layers: tuple[nn.Module, ...]) -> None:
    predictor, hidden = nn.Sequential(*layers, nn.Flatten()), torch.randn(3, 4, 4, 4)
    predictor(hidden)
    torch.testing.assert_close(fold_normalisation(predictor)(hidden), predictor.eval()(hidden))


def test_the_published_variants_are_the_six_of_the_paper() -> None:
    assert PUBLISHED_VARIANTS == ("fc(1024)", "fc(512)", "pool(8192)", "pool(4096)", "conv(3,1)", "conv(5,2)")
    assert expand_variants(["published", "fc(512)"]) == PUBLISHED_VARIANTS
    assert expand_variants(["default"]) == DEFAULT_VARIANTS


def test_a_fully_connected_predictor_has_one_layer_of_the_given_width() -> None:
    layers = [layer for layer in build_predictor("fc(512)", (4, 8, 8), 10) if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(256, 512), (512, 10)]


def weights(variant: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of the weights of every layer but normalisation, which is folded away."""
    return [
        tuple(layer.weight.shape)
        for layer in build_predictor(variant, shape, 10).modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]


def test_the_published_pool_has_the_size_of_the_papers_table() -> None:
    """33 MB for Pool(8192): its hidden layer of 1,024 units."""
    assert weights("pool(8192)", (64, 32, 32)) == [(1024, 8192), (10, 1024)]
    assert round(4 * 1024 * 8192 / 1e6) in (33, 34)
    assert weights("pool(8192)", (16, 16, 16)) == [(1024, 4096), (10, 1024)], "nothing to pool"


@pytest.mark.parametrize(("shape", "left"), [((16, 32, 32), 8192), ((40, 28, 28), 7840), ((7, 11), 77)])
def test_the_published_pool_averages_the_hidden_values_in_a_row(shape: tuple[int, ...], left: int) -> None:
    predictor = build_predictor("pool(8192)", shape, 10).eval()
    hidden = torch.randn(2, *shape)
    pooled = nn.functional.adaptive_avg_pool1d(hidden.flatten(1), left)  # as its authors do
    for layer in list(predictor)[-1]:
        pooled = layer(pooled)
    torch.testing.assert_close(predictor(hidden), pooled)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (5, 2), (4, 3)])
def test_the_published_convolution_runs_along_the_hidden_values(kernel: int, stride: int) -> None:
    predictor = fold_normalisation(build_predictor(f"conv({kernel},{stride})", (4, 8, 8), 10))
    convolution, linear = (layer for layer in predictor.modules() if isinstance(layer, nn.Conv2d | nn.Linear))
    theirs = nn.Conv1d(1, 1, kernel, stride)
    theirs.weight.data, theirs.bias = convolution.weight.data[:, :, 0], convolution.bias
    hidden = torch.randn(3, 4, 8, 8)
    torch.testing.assert_close(predictor(hidden), linear(theirs(hidden.reshape(3, 1, -1)).relu().flatten(1)))


def test_pooling_leaves_at_most_the_given_number_of_values() -> None:
    for values in (4096, 8192):
        last = list(build_predictor(f"pool-linear({values})", (16, 32, 32), 10))[-1]
        assert isinstance(last, nn.Linear)
        assert values / 2 <= last.in_features <= values


def test_a_user_adds_an_architecture_in_ten_lines() -> None:
    @register_predictor("linear")
    def linear(hidden_shape: tuple[int, ...], classes: int) -> nn.Module:
        values = math.prod(hidden_shape)
        return nn.Sequential(*feature_map(hidden_shape), nn.Flatten(), nn.Linear(values, classes))

    assert "linear" in predictor_families()
    assert build_predictor("linear", (6, 9), 4)(torch.randn(2, 6, 9)).shape == (2, 4)


def test_a_family_name_has_one_owner() -> None:
    def other(hidden_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Linear(hidden_shape[0], classes)

    with pytest.raises(VariantError, match=r"predictor family 'fc' belongs to .*fully_connected"):
        register_predictor("fc")(other)


def test_variants_are_parsed_with_spaces_or_without() -> None:
    assert parse_variant("conv(3,1)") == parse_variant(" conv( 3 , 1 ) ") == ("conv", (3, 1))


@pytest.mark.parametrize("text", ["nothing(3)", "fc(", "fc(1.5)", "", "fc 3"])
def test_an_unknown_variant_lists_the_known_families(text: str) -> None:
    with pytest.raises(
        VariantError,
        match=re.escape(f"unknown variant {text!r}")
        + r".*conv, conv2d, fc, glance, grid, pool.*, or register your own first, with gati.caches.register_",
    ):
        parse_variant(text)


def test_a_variant_with_wrong_numbers_says_so() -> None:
    with pytest.raises(VariantError, match=r"variant conv2d\(4,1\) cannot be .* the kernel must be odd"):
        build_predictor("conv2d(4,1)", (3, 8, 8), 10)
    with pytest.raises(VariantError, match=r"variant conv\(3,0\) cannot be built .* must be at least 1"):
        build_predictor("conv(3,0)", (3, 8, 8), 10)
    with pytest.raises(VariantError, match=r"variant pool\(0\) cannot be .* must keep at least 1 value"):
        build_predictor("pool(0)", (3, 8, 8), 10)
    for variant, wrong in (
        ("fc(0)", "width"),
        ("grid(0)", "width"),
        ("pyramid(0)", "width"),
        ("pool-linear(0)", "values"),
        ("glance(0,4)", "cells"),
        ("glance(4,0)", "width"),
        ("scene(1,1,0)", "prototypes"),
    ):
        with pytest.raises(VariantError, match=rf"cannot be built .*: {wrong} must be at least 1 \(got 0\)"):
            build_predictor(variant, (3, 8, 8), 10)
    with pytest.raises(VariantError, match=r"variant fc cannot be built"):
        build_predictor("fc", (3, 8, 8), 10)


@pytest.mark.parametrize(
    ("built", "reason"),
    [
        (lambda shape, classes: nn.Linear(shape[7], classes), "IndexError: tuple index out of range"),
        (lambda shape, classes: {}["width"], "KeyError: 'width'"),
        (lambda shape, classes: None, "its builder returns None: return an nn.Module"),
    ],
    ids=["index", "key", "nothing"],
)
def test_a_builder_of_the_user_that_fails_is_one_line(built: Builder, reason: str) -> None:
    register_predictor("mine")(built)
    with pytest.raises(VariantError) as error:
        build_predictor("mine", (3, 8, 8), 10)
    assert str(error.value).startswith("variant mine") and str(error.value).endswith(reason)


def test_a_variant_too_large_for_the_memory_is_one_line() -> None:
    with pytest.raises(VariantError, match=r"variant fc\(99999999999\) cannot be built .*memory") as error:
        build_predictor("fc(99999999999)", (3, 8, 8), 10)
    assert "\n" not in str(error.value)


def test_a_hidden_output_of_four_dimensions_is_refused() -> None:
    with pytest.raises(VariantError, match=r"cannot read hidden outputs of shape \(2, 3, 4, 5\)"):
        build_predictor("fc(8)", (2, 3, 4, 5), 10)
