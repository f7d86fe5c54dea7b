"""Networks with fewer blocks: which remain, and that what is not needed goes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gati.errors import BlockError, ModelError
from gati.model.shorten import (
    BlockShape,
    EndingAt,
    block_shapes,
    choose_blocks,
    leave_out,
    output_of,
    stages,
    without_unused,
)


def row(shapes: list[int], changing: tuple[int, ...] = ()) -> list[BlockShape]:
    """Blocks whose outputs have so many channels; a new number of channels changes the shape."""
    return [
        BlockShape(str(at), (channels,), at not in changing and bool(at) and channels == shapes[at - 1])
        for at, channels in enumerate(shapes)
    ]


@pytest.mark.parametrize(
    ("count", "names", "ends"),
    [(1, "0", True), (2, "02", True), (3, "025", False), (4, "0256", False), (5, "02357", False)],
)
def test_the_first_of_each_stage_come_first(count: int, names: str, ends: bool) -> None:
    assert choose_blocks(row([8, 8, 16, 16, 16, 32, 32, 32, 32]), count) == (tuple(names), ends)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=24), st.data())
def test_what_remains_is_in_order_and_as_many_as_wanted(sizes: list[int], data: st.DataObject) -> None:
    shapes = [stage for stage, length in enumerate(sizes) for _ in range(length)]
    blocks = row(shapes)
    count = data.draw(st.integers(1, len(blocks) - 1))
    kept = choose_blocks(blocks, count)
    places = [int(name) for name in kept.names]
    assert places == sorted(set(places)) and len(places) == count
    assert kept.ends == (count < len(stages(blocks))) == (count < len(sizes))
    assert set(stages(blocks)[:count]) <= set(places)


def test_what_changes_the_shape_within_a_stage_stays() -> None:
    blocks = row([8, 8, 8, 16, 16], changing=(1,))
    assert choose_blocks(blocks, 2).names == ("0", "1", "3")


@pytest.mark.parametrize("count", [0, 5, 6])
def test_as_many_blocks_as_there_are_is_an_error(count: int) -> None:
    with pytest.raises(BlockError, match="has 5 distinct blocks: keep fewer"):
        choose_blocks(row([8, 8, 8, 16, 16]), count)


class Unit(nn.Module):
    """Two layers, which also counts its calls."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(before, channels, 1), nn.Conv2d(channels, channels, 1)
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return scale * self.other(torch.relu(self.one(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([Unit(3, 4), Unit(4, 4), Unit(4, 6), Unit(6, 6)])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.body:
            x = unit(x, scale=0.5)
        return self.head(x.mean((2, 3)))


def test_blocks_are_left_out_whatever_they_are_called_with() -> None:
    network, x = Network().eval(), torch.randn(2, 3, 4, 4)
    shapes = block_shapes(network, x)
    assert [(each.shape[0], each.keeps_shape) for each in shapes] == [
        (4, False), (4, True), (6, False), (6, True)
    ]  # fmt: skip
    expected = network.head(network.body[2](network.body[0](x, 0.5), 0.5).mean((2, 3)))
    leave_out(network, ["body.1", "body.3"])
    torch.testing.assert_close(network(x), expected)


def test_what_follows_the_block_it_ends_at_is_neither_run_nor_kept() -> None:
    network, x = Network().eval(), torch.randn(2, 3, 4, 4)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    ending = EndingAt(network, "body.1", head).eval()
    expected = head(network.body[1](network.body[0](x, 0.5), 0.5))
    before = network.body[2].calls
    torch.testing.assert_close(ending(x), expected)
    assert network.body[2].calls == before and not network.body[1]._forward_hooks
    assert torch.equal(output_of(network, "body.1", x), network.body[1](network.body[0](x, 0.5), 0.5))
    lean = without_unused(ending, x)
    torch.testing.assert_close(lean(x), expected)
    kept = sum(each.numel() for unit in network.body[:2] for each in unit.parameters())
    assert sum(each.numel() for each in lean.parameters()) == kept + sum(
        each.numel() for each in head.parameters()
    )


class Overwriting(nn.Module):
    """Changes a tensor in place, and goes on with the tensor instead of what the operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        hidden.add_(3.0)
        return hidden * 2.0


def test_a_network_that_writes_in_place_is_told_or_kept_whole() -> None:
    module, x = Overwriting().eval(), torch.randn(2, 3)
    try:
        lean = without_unused(module, x)
    except ModelError as error:
        assert "seems unused" in str(error)
    else:
        torch.testing.assert_close(lean(x), module(x))
