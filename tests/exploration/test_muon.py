"""Muon: what its directions are, and that it learns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gati.exploration.muon import Muon, orthogonalised


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 40), st.integers(2, 60), st.integers(0, 10**6), st.sampled_from([1e-4, 1.0, 1e4]))
def test_directions_have_no_preferred_side(rows: int, columns: int, seed: int, scale: float) -> None:
    """Same singular vectors, values near 1 unless they are next to nothing, whatever the scale."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalised(scale * matrix)
    assert found.shape == matrix.shape and found.dtype == matrix.dtype
    across = left.T @ found @ right.T
    sides = across.diagonal()
    clear = values > 0.05 * values.square().sum().sqrt()
    assert ((sides[clear] > 0.5) & (sides[clear] < 1.35)).all()
    assert (across - torch.diag(sides)).abs().max() < 0.1


def test_nothing_to_learn_from_moves_nothing() -> None:
    assert torch.equal(orthogonalised(torch.zeros(3, 5)), torch.zeros(3, 5))


@pytest.mark.parametrize("shape", [(6, 2, 3, 3), (20, 1, 3, 3)], ids=["wide", "tall"])
def test_kernels_turn_by_their_rate_and_keep_their_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    kernel = nn.Parameter(torch.randn(shape).contiguous(memory_format=torch.channels_last))
    optimiser = Muon([kernel], 0.01)
    for _ in range(5):
        before = kernel.detach() * (len(kernel) ** 0.5 / kernel.detach().norm())
        kernel.grad = torch.randn(shape)
        optimiser.step()
        turned = float((kernel.detach() - before).norm() / before.norm())
        rank = min(shape[0], shape[1] * 9)
        assert turned == pytest.approx(0.01 * (rank / shape[0]) ** 0.5, rel=0.35)
    assert float(kernel.detach().norm()) == pytest.approx(len(kernel) ** 0.5, rel=0.02)


def test_what_is_no_kernel_learns_by_momentum() -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(5, 3), nn.Linear(5, 3)
    other.load_state_dict(one.state_dict())
    muon = Muon(one.parameters(), 0.05, weight_decay=0.01)
    plain = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    for _ in range(6):
        x = torch.randn(4, 5)
        for layer, optimiser in ((one, muon), (other, plain)):
            optimiser.zero_grad()
            layer(x).square().sum().backward()
            optimiser.step()
    for found, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
