"""`gati blocks` on networks that it cannot give inputs to."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from gati.errors import ModelError
from gati.exploration.inspect import blocks


class Pair(nn.Module):
    """Compares two pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        found: Tensor = self.stem(one) - self.stem(other)
        return found.mean((2, 3))


class Flat(nn.Module):
    """Takes grey pictures; no convolution says so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(x.flatten(1)))
        return found


def test_a_network_without_convolutions_may_take_grey_pictures() -> None:
    assert blocks(f"{__file__}:Flat", pattern="blocks.*", size=(8, 8)).input_shape == (1, 8, 8)


def test_a_network_of_two_arguments_is_one_line() -> None:
    with pytest.raises(ModelError) as error:
        blocks(f"{__file__}:Pair")
    message = str(error.value)
    assert "takes no inputs of 32x32, 224x224 pixels (TypeError: " in message
    assert "other" in message and "\n" not in message
