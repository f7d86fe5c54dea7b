"""What the training losses promise."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gati.caches import distillation_loss, feature_loss, selector_loss

seeds = st.integers(0, 2**31 - 1)


@given(seed=seeds, temperature=st.floats(0.5, 8), weight=st.floats(0, 1))
def test_no_predictor_beats_the_base_model_itself_when_only_soft_targets_count(
    seed: int, temperature: float, weight: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 5, generator=generator)
    other = torch.randn(6, 5, generator=generator)
    same = distillation_loss(base, base, temperature=temperature, soft_weight=1.0)
    different = distillation_loss(other, base, temperature=temperature, soft_weight=1.0)
    assert abs(float(same)) < 1e-4
    assert float(different) >= float(same) - 1e-5
    assert float(distillation_loss(other, base, temperature=temperature, soft_weight=weight)) >= -1e-5


def test_the_loss_is_the_documented_formula() -> None:
    base, predicted = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[0.5, 1.0, 0.0]])
    p, q = (base / 3).softmax(1), (predicted / 3).softmax(1)
    soft = (p * (p / q).log()).sum()
    hard = -predicted.log_softmax(1)[0, 0]
    expected = 0.25 * 9 * soft + 0.75 * hard
    torch.testing.assert_close(distillation_loss(predicted, base, temperature=3, soft_weight=0.25), expected)


def test_labels_play_no_part_only_the_class_the_base_model_gives() -> None:
    base = torch.tensor([[0.0, 5.0], [5.0, 0.0]])
    imitating, contradicting = base * 2, base.flip(1) * 2
    assert distillation_loss(imitating, base) < distillation_loss(contradicting, base)


@given(seed=seeds, weight=st.floats(0, 1))
def test_rows_count_as_their_weights_say(seed: int, weight: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    base, predicted = torch.randn(6, 5, generator=generator), torch.randn(6, 5, generator=generator)
    rows = [distillation_loss(predicted[i : i + 1], base[i : i + 1], soft_weight=weight) for i in range(6)]
    weights = torch.rand(6, generator=generator) + 0.1
    expected = (torch.stack(rows) * weights).sum() / weights.sum()
    found = distillation_loss(predicted, base, soft_weight=weight, row_weights=weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    even = distillation_loss(predicted, base, soft_weight=weight, row_weights=torch.full((6,), 0.2))
    torch.testing.assert_close(even, distillation_loss(predicted, base, soft_weight=weight))


@given(seed=seeds, scale=st.floats(0.1, 100), shift=st.floats(-5, 5))
def test_features_match_in_direction_alone(seed: int, scale: float, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.randn(4, 8, generator=generator)
    centred = wanted - wanted.mean(1, keepdim=True)
    assert abs(float(feature_loss(scale * centred, wanted * scale + shift))) < 1e-3
    assert abs(float(feature_loss(-scale * centred, wanted)) - 2) < 1e-3
    weights = torch.tensor([0.0, 0.0, 1.0, 0.0])
    found = torch.randn(4, 8, generator=generator)
    torch.testing.assert_close(
        feature_loss(found, wanted, row_weights=weights), feature_loss(found[2:3], wanted[2:3])
    )


def test_a_false_positive_costs_its_penalty() -> None:
    confident = torch.tensor([4.0])
    wrong, right = torch.tensor([False]), torch.tensor([True])
    single = selector_loss(confident, wrong, false_positive_penalty=1.0)
    torch.testing.assert_close(selector_loss(confident, wrong, false_positive_penalty=3.0), 3 * single)
    torch.testing.assert_close(
        selector_loss(confident, right, false_positive_penalty=3.0),
        selector_loss(confident, right, false_positive_penalty=1.0),
    )
