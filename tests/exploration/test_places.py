"""Where caches may go: blocks, the input before them, and the input alone where no block is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gati
from gati.errors import BlockError, CutError, VariantError
from gati.exploration import candidates, stages
from gati.exploration.places import find_places
from gati.model.segments import trace
from tests.exploration.networks import Net

READING, NOT_READING = ("student(8)", "grid(16)"), ("grid(16)",)


class Recurrent(nn.Module):
    """Reads sequences of frames [B, 12, 5]; nothing in it repeats as blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(5, 16, 2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    return Recurrent()


def vectors() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4))


class Named(Net):
    """Has a module of the name that the input goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Identity()


def test_the_input_comes_first_where_anything_reads_it() -> None:
    example = torch.randn(2, 1, 8, 8)
    blocks = tuple(f"blocks.{number}" for number in range(4))
    assert find_places(Net(), None, example, READING) == (("input", *blocks), "")
    assert find_places(Net(), None, example, NOT_READING) == (blocks, "")
    assert find_places(Net(), None, example, NOT_READING, ["companion(1)"]).names[0] == "input"


class Mixed(Net):
    """Its second block computes in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for number, block in enumerate(self.blocks):
            x = block(x.double() if number == 1 else x.float())
        return self.head(nn.functional.avg_pool2d(x, 2).flatten(1))


def test_found_blocks_that_caches_cannot_read_are_left_out_and_named_ones_are_not() -> None:
    example = torch.randn(2, 1, 8, 8)
    found = find_places(Mixed(), None, example, READING)
    assert found.names == ("input", "blocks.0", "blocks.2", "blocks.3")
    assert found.note == (
        "left out blocks.1: caches read float32 tensors [batch, ...], which these do not return"
    )
    assert find_places(Mixed(), "blocks.*", example, NOT_READING).names == tuple(
        f"blocks.{number}" for number in range(4)
    )


class LengthFirst(nn.Module):
    """Its blocks pass on tensors [length, batch, width], as XLNet's do."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


def test_a_network_of_whose_blocks_caches_can_read_none_has_its_input() -> None:
    network, example = LengthFirst().eval(), torch.randn(2, 5, 8)
    places = find_places(network, None, example, READING)
    assert places.names == ("input",)
    assert places.note.startswith("left out encoder.layers.0, encoder.layers.1: caches read float32 tensors")
    assert find_places(network, None, example, NOT_READING).names == ("encoder.layers.0", "encoder.layers.1")


class BatchFirst(nn.Module):
    """Its blocks pass on tensors [batch, length, width], in the precision of their weights."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x.to(next(self.encoder.parameters()).dtype))
        return self.head(hidden.mean(1).float())


def double(module: nn.Module) -> None:
    module.double()


def nan(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.fill_(torch.nan)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (double, "is float64, and caches read float32; let the network compute in float32"),
        (nan, "is NaN; check the checkpoint and the preprocessing"),
    ],
)
def test_what_can_be_cured_in_blocks_is_told_instead_of_caches_at_the_input_alone(
    change: Callable[[nn.Module], None], reason: str
) -> None:
    network, example = BatchFirst().eval(), torch.randn(2, 5, 8)
    change(network.encoder)
    places = find_places(network, None, example, READING)
    with pytest.raises(CutError, match=f"the output of block 'encoder.layers.0' {reason}"):
        trace(network, example, places.names)


def test_a_module_called_input_keeps_its_name() -> None:
    example = torch.randn(2, 1, 8, 8)
    places = find_places(Named(), None, example, READING)
    assert "input" not in places.names
    assert places.note.startswith("left out student(8): the network has a module named 'input'")
    with pytest.raises(
        VariantError, match=r"so student\(8\) cannot be placed at the network's input; leave it out"
    ):
        find_places(Named(), None, example, ("student(8)",))


def test_a_network_without_blocks_has_its_input_unless_blocks_were_asked_for() -> None:
    example = torch.randn(2, 12, 5)
    places = find_places(recurrent(), None, example, READING)
    assert places.names == ("input",)
    assert places.note == (
        "no blocks found in Recurrent; name them with --blocks, from: cell, head; "
        "until then there are only caches at the input"
    )
    with pytest.raises(BlockError, match="no blocks found"):
        find_places(recurrent(), None, example, NOT_READING)
    with pytest.raises(BlockError):
        find_places(recurrent(), "layer.*", example, READING)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(candidates, "too_slow", lambda *_: "")
    monkeypatch.setattr(stages, "LEAST_STUDENT_STEPS", 60)
    return


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(("network", "shape"), [("recurrent", (12, 5)), ("vectors", (64,))])
def test_sequences_and_vectors_go_all_the_way(network: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).normal(size=(900, *shape)).astype(np.float32)
    np.savez(tmp_path / "val.npz", inputs=inputs)
    explored = gati.explore(
        f"{__file__}:{network}", data=tmp_path / "val.npz", out=tmp_path / "out", variants=["student(16)"],
        epochs=1,
    )  # fmt: skip
    assert [(trial.block, trial.status) for trial in explored.trials] == [("input", "trained")]
    chosen = gati.compose(tmp_path / "out", accuracy=0.02, confidence=None, backend="torch")
    assert chosen.expected.agreement >= 0.02
    base = {"recurrent": recurrent, "vectors": vectors}[network]().eval()
    expected = base(torch.from_numpy(inputs[:8])).argmax(1).tolist()
    with gati.load(tmp_path / "out") as engine:
        answers = engine(torch.from_numpy(inputs[:8]))
    late = [number for number, answer in enumerate(answers) if answer.exit is None]
    assert [answers[number].class_index for number in late] == [expected[number] for number in late]
