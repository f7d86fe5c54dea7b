"""What counts as a usable base model."""

import numpy as np
import pytest
import torch

from gati.errors import DataError, ModelError
from gati.model.outputs import check_base_outputs, check_more_than_one_class, outputs_kind


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            torch.zeros(2, 3, 4),
            "the network returns shape [2, 3, 4]; a classifier must return [batch, classes] with "
            "at least 2 classes",
        ),
        (
            torch.zeros(2, 1),
            "the network returns shape [2, 1], one score per input; return one for each class: for a logit "
            "x [batch, 1] torch.cat([torch.zeros_like(x), x], 1), for a probability torch.cat([1 - x, x], 1)",
        ),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            "the network returns dtype torch.int64; a classifier must return scores, not class numbers",
        ),
        (
            torch.tensor([[0.0, 1.0], [float("nan"), 0.0], [float("inf"), 0.0]]),
            "the network returns NaN or infinity for 2 of 3 inputs; "
            "check the checkpoint and the preprocessing (--mean, --std)",
        ),
    ],
)
def test_unusable_outputs_are_one_line(outputs: torch.Tensor, message: str) -> None:
    with pytest.raises(ModelError) as error:
        check_base_outputs(outputs)
    assert str(error.value) == message


def test_usable_outputs_pass_through() -> None:
    outputs = torch.randn(4, 10)
    assert check_base_outputs(outputs) is outputs


def test_probabilities_are_told_from_logits() -> None:
    logits = torch.randn(5, 10)
    assert outputs_kind(logits) == "logits"
    assert outputs_kind(logits.softmax(1)) == "probabilities"
    assert outputs_kind(logits.abs() * 3) == "logits"


def test_one_class_everywhere_is_an_error() -> None:
    with pytest.raises(DataError) as error:
        check_more_than_one_class(np.array([4, 4, 4]), "val.npz")
    assert str(error.value) == (
        "the network answers class 4 for all 3 images of val.npz; give images of several "
        "classes, or check the "
        "checkpoint and the preprocessing"
    )
    check_more_than_one_class(torch.tensor([1, 2]))


def test_no_inputs_is_an_error() -> None:
    with pytest.raises(DataError, match="^val is empty; give at least a few hundred images$"):
        check_more_than_one_class(np.array([]), "val")
