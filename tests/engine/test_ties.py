"""Kernels round differently for one row and for many: the batch decides no class all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gati.engine.concurrent import ConcurrentEngine
from gati.engine.engine import Engine
from gati.engine.exits import EngineExit
from gati.model.segments import trace
from tests.engine.networks import ready
from tests.waiting import LONG_S

ROWS = 6


class Rounded(nn.Module):
    """Adds to the first class what rounding may add in a batch, and nothing for a single row."""

    def forward(self, scores: Tensor) -> Tensor:
        rows = torch.ones_like(scores).sum(0)
        return scores + (rows - 1.0) * torch.tensor([1e-6, 0.0, 0.0])


class Network(nn.Module):
    """The class scores are the input's values, or with `in_place` their negatives."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(3, 3, bias=False), Rounded()
        self.block.weight = nn.Parameter(torch.eye(3))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.block(x.neg_() if self.in_place else x))
        return result


class Cache(nn.Module):
    """Takes every input, by the class that is largest."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded = Rounded()

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.rounded(hidden).softmax(1)
        return probabilities, torch.ones_like(probabilities[:, 0])


class Large(nn.Module):
    """A cache with scores as large as its input's first value, which a batch makes a little larger."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.ones_like(hidden).sum(0)
        return hidden.softmax(1), hidden[:, 0] + 1e-2 * (rows[0] - 1.0)


def engine_of(*exits: EngineExit, in_place: bool = False) -> Engine:
    return Engine(trace(ready(Network(in_place=in_place)), torch.rand(2, 3), ["block"]), exits)


def nearly_equal() -> Tensor:
    """Inputs whose second class is larger by less than a batch adds to the first one."""
    return torch.tensor([[1.0, 1.0 + 2e-7, 0.0]]).repeat(ROWS, 1)


@pytest.mark.parametrize("exits", [(), (EngineExit("block", ready(Cache()), 0.5),)], ids=["base", "block"])
def test_of_nearly_equal_classes_a_batch_answers_the_one_that_a_single_request_gets(
    exits: tuple[EngineExit, ...],
) -> None:
    engine, x = engine_of(*exits), nearly_equal()
    with torch.inference_mode():
        assert engine.traced.base(x).argmax(1).tolist() == [0] * ROWS, "else there is nothing to decide"
    name = "block" if exits else "base"
    alone = [engine(row)[0] for row in x.split(1)]
    assert [(each.class_index, each.exit) for each in alone] == [(1, name)] * ROWS
    assert [(each.class_index, each.exit) for each in engine(x)] == [(1, name)] * ROWS
    assert [each.class_index for each in engine.base(x)] == engine.reference(x).tolist() == [1] * ROWS
    with ConcurrentEngine(engine, workers=1) as shared:
        with shared._work.changed:  # so that they are one batch
            waiting = [shared.submit(row) for row in x.split(1)]
        answers = [each.result(LONG_S) for each in waiting]
    assert [(each.class_index, each.exit) for each in answers] == [(1, name)] * ROWS


def test_a_network_that_changes_its_input_decides_by_what_it_was_given() -> None:
    engine, x = engine_of(in_place=True), -nearly_equal()
    assert engine.traced.changes_input
    assert [each.class_index for each in engine.base(x)] == engine.reference(x).tolist() == [1] * ROWS
    assert [each.class_index for each in engine(x)] == [1] * ROWS


@pytest.mark.parametrize("less", [0.005, -0.005])
def test_the_batch_decides_no_hit_however_large_scores_are(less: float) -> None:
    engine = engine_of(EngineExit("block", ready(Large()), 2e4 + less))
    x = torch.tensor([[2e4, 0.0, 0.0]]).repeat(ROWS, 1)
    (alone,) = engine(x[:1])
    assert alone.exit == ("base" if less > 0.0 else "block")
    assert [each.exit for each in engine(x)] == [alone.exit] * ROWS
