"""Pooling before training: both parts together are the predictor, and equal fronts are computed once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gati.caches import build_predictor
from gati.exploration.fronts import Fronts, split_front


@pytest.mark.parametrize("variant", ["grid(8)", "pyramid(4)", "fc(8)", "conv2d(3,1)", "pool-linear(64)"])
@pytest.mark.parametrize("shape", [(6, 40, 48), (6, 8, 8), (9, 12), (24,)])
def test_both_parts_are_the_predictor_and_the_first_holds_no_weights(
    variant: str, shape: tuple[int, ...]
) -> None:
    predictor = build_predictor(variant, shape, 5).eval()
    front, rest = split_front(predictor)
    hidden = torch.randn(3, *shape)
    assert torch.equal(rest(front(hidden)), predictor(hidden))
    assert not list(front.parameters())
    assert [id(each) for each in rest.parameters()] == [id(each) for each in predictor.parameters()]


def test_what_two_predictors_begin_with_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    original = nn.AdaptiveAvgPool2d.forward

    def counted(self: nn.AdaptiveAvgPool2d, values: Tensor) -> Tensor:
        calls.append(tuple(values.shape))
        return original(self, values)

    monkeypatch.setattr(nn.AdaptiveAvgPool2d, "forward", counted)
    hidden = {"early": torch.randn(2, 3, 64, 64), "late": torch.randn(2, 3, 40, 40)}
    named = [("early", "pyramid(4)"), ("early", "pyramid(8)"), ("early", "grid(8)"), ("late", "pyramid(4)")]
    predictors = {
        f"{block} {variant}": (block, build_predictor(variant, tuple(hidden[block].shape[1:]), 5).eval())
        for block, variant in named
    }
    fronts = Fronts(predictors)
    pooled = fronts.read(fronts.look(hidden))
    assert sorted(calls) == [(2, 3, 40, 40), (2, 3, 64, 64)]
    assert pooled["early pyramid(4)"] is pooled["early pyramid(8)"]
    for name, (block, predictor) in predictors.items():
        assert torch.equal(fronts.rests[name](pooled[name]), predictor(hidden[block]))


class Own(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.flatten(1)


class Scaled(nn.Sequential):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(2.0 * hidden)


@pytest.mark.parametrize("own", [Own(), Scaled(nn.AdaptiveAvgPool2d(1), nn.Flatten())], ids=["own", "scaled"])
def test_a_predictor_with_a_forward_of_its_own_reads_all(own: nn.Module) -> None:
    front, rest = split_front(own)
    assert len(front) == 0 and rest is own
