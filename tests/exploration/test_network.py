"""The example that a library's network is traced and recognised with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gati.exploration.network import example_for, example_of
from gati.model.preprocess import Preprocessing
from gati.model.segments import trace

CPU = torch.device("cpu")
GREY = Preprocessing((0.0,), (1.0,), channels=1)


class OfLogarithms(nn.Module):
    """A network that gives NaN for negative pixels, which no picture has."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor
        self.blocks = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.log(x + self.floor)).mean((2, 3)))


@pytest.mark.parametrize(("floor", "of_noise"), [(1e-3, False), (100.0, True)])
def test_a_network_that_gives_nan_for_noise_is_traced_with_values_of_pictures(
    floor: float, of_noise: bool
) -> None:
    """It could be explored, and its library not opened."""
    network = OfLogarithms(floor).eval().requires_grad_(False)
    example = example_for(network, GREY, (1, 8, 8), CPU)
    assert torch.equal(example, example_for(network, GREY, (1, 8, 8), CPU))
    assert torch.equal(example, example_of(GREY, (1, 8, 8))) is of_noise
    assert of_noise or (float(example.min()) >= 0.0 and float(example.max()) <= 1.0)
    assert trace(network, example, ["blocks"]).classes == 3
