"""Quantised lookups whose biases take back what rounding shifts, and whose ranges fit what is usual."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="no ONNX Runtime, which quantises")

from gati.engine.graph.biases import Floats, correct_biases
from gati.engine.graph.convert import Converter
from gati.engine.graph.quantise_lookups import _probabilities, _quantised, quantise_lookup
from gati.engine.graph.stages import GraphStage
from tests.engine.networks import CLASSES, ready

pytestmark = pytest.mark.slow

CHANNELS = 16


class Separable(nn.Module):
    """Depthwise convolutions, whose few weights are rounded in the same direction more often."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, 2 * CHANNELS, 1),
            nn.ReLU(),
            nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 3, padding=1, groups=CHANNELS),
            nn.ReLU(),
        )
        self.last = nn.Linear(2 * CHANNELS, CLASSES)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.body(hidden).mean((2, 3))
        probabilities = self.last(pooled).softmax(1)
        return probabilities, probabilities.amax(1)


def hidden_outputs(count: int, seed: int = 0) -> Floats:
    """Positive, as after ReLU, with means that differ by channel."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.rand(1, CHANNELS, 1, 1, generator=torch.Generator().manual_seed(9)) * 3.0
    values = (torch.randn(count, CHANNELS, 8, 8, generator=generator) + channels).relu()
    return np.asarray(values.numpy(), np.float32)


def rows_of(values: Floats) -> list[Floats]:
    return [np.ascontiguousarray(row) for row in np.split(values, len(values))]


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """Its classes are about equally frequent, and it is sure of some inputs."""
    torch.manual_seed(2)
    network, x = Separable(), torch.from_numpy(hidden_outputs(300, seed=5))
    with torch.no_grad():
        pooled = network.body(x).mean((2, 3))
        network.last.weight.div_(network.last(pooled).std() / 20.0)
        network.last.bias.copy_(-(network.last.weight @ pooled.mean(0)))
    return Converter()(GraphStage(ready(network), (x[:1],), "separable"), "separable")


def last_layer(model: onnx.ModelProto) -> str:
    return str([node.name for node in model.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")][-1])


def error(model: onnx.ModelProto, given: onnx.ModelProto, rows: list[Floats]) -> float:
    return float(np.abs(_probabilities(model, rows) - _probabilities(given, rows)).mean())


def test_the_answers_come_closer_on_inputs_that_were_not_used(model: onnx.ModelProto) -> None:
    calibration, unseen = rows_of(hidden_outputs(60)), rows_of(hidden_outputs(100, seed=1))
    plain = _quantised(model, last_layer(model), calibration, typical=False)
    corrected = copy.deepcopy(plain)
    correct_biases(corrected, model, calibration)
    assert error(corrected, model, unseen) < 0.8 * error(plain, model, unseen)


def test_convolutions_over_time_are_corrected_too() -> None:
    class OverTime(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
            self.last = nn.Linear(CHANNELS, CLASSES)

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            probabilities = (30.0 * self.last(self.first(hidden).relu().mean(2))).softmax(1)
            return probabilities, probabilities.amax(1)

    torch.manual_seed(0)
    values = hidden_outputs(160).reshape(160, CHANNELS, -1)
    given = Converter()(GraphStage(ready(OverTime()), (torch.from_numpy(values[:1]),), "time"), "time")
    plain = _quantised(given, last_layer(given), rows_of(values[:60]), typical=False)
    corrected = copy.deepcopy(plain)
    correct_biases(corrected, given, rows_of(values[:60]))
    unseen = rows_of(values[60:])
    assert error(corrected, given, unseen) < 0.8 * error(plain, given, unseen)


def test_only_biases_change(model: onnx.ModelProto) -> None:
    calibration = rows_of(hidden_outputs(40))
    plain = _quantised(model, last_layer(model), calibration, typical=False)
    corrected = copy.deepcopy(plain)
    correct_biases(corrected, model, calibration)
    assert list(corrected.graph.node) == list(plain.graph.node)
    changed = {
        after.name
        for before, after in zip(plain.graph.initializer, corrected.graph.initializer, strict=True)
        if before != after
    }
    makers = {name: node for node in plain.graph.node for name in node.output}
    layers = [node for node in plain.graph.node if node.op_type in ("Conv", "Gemm")]
    biases = {makers[node.input[2]].input[0] for node in layers if node.input[2] in makers}
    assert len(biases) == 3 and changed == biases


def test_a_layer_of_which_nothing_is_rounded_keeps_its_bias() -> None:
    """Weights and inputs that 8 bits represent exactly: there is no shift."""

    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, CLASSES)
            with torch.no_grad():
                self.first.weight.copy_(torch.diag(torch.tensor([127.0, 127.0, 127.0, 127.0])) / 127.0)

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            probabilities = self.last(self.first(hidden)).softmax(1)
            return probabilities, probabilities.amax(1)

    torch.manual_seed(0)
    given = Converter()(GraphStage(ready(Exact()), (torch.zeros(1, 4),), "exact"), "exact")
    rows = [np.full((1, 4), value, np.float32) for value in (0.0, 255.0, 17.0, 200.0)]
    plain = _quantised(given, last_layer(given), rows, typical=False)
    corrected = copy.deepcopy(plain)
    correct_biases(corrected, given, rows)
    assert corrected == plain


def test_rare_extremes_do_not_cost_the_others_their_precision(model: onnx.ModelProto) -> None:
    """One input in sixty is a hundred times as large: all values of the others would be a few steps."""
    values = hidden_outputs(60)
    values[7] *= 100.0
    unseen = rows_of(hidden_outputs(100, seed=1))
    plain = _quantised(model, last_layer(model), rows_of(values), typical=False)
    assert error(quantise_lookup(model, values), model, unseen) < 0.5 * error(plain, model, unseen)
