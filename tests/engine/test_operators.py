"""torch's table of operators is made once, and is torch's again afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.onnx import export

from gati.engine.graph import operators
from gati.engine.graph.convert import convert_here
from gati.engine.graph.operators import one_table_of_operators


@pytest.mark.slow
def test_tables_are_made_once_and_are_not_shared() -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    usual = ONNXRegistry.from_torchlib
    with one_table_of_operators():
        first, second = ONNXRegistry.from_torchlib(18), ONNXRegistry.from_torchlib(18)
        older = ONNXRegistry.from_torchlib(17)
    assert ONNXRegistry.from_torchlib == usual
    assert first.functions.keys() == second.functions.keys() == usual(18).functions.keys()
    assert (first.opset_version, older.opset_version) == (18, 17)
    some = next(iter(first.functions))
    first.functions[some].clear()
    assert second.functions[some]


@pytest.mark.slow
def test_models_are_the_same_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    example = (torch.zeros(1, 3, 8, 8),)
    monkeypatch.setattr(torch.onnx, "export", export)  # each time, not once for all tests
    models = [convert_here(network, example, "piece").SerializeToString() for _ in range(2)]
    monkeypatch.setattr(operators, "_table", lambda made, **asked: made.__get__(None, _registry())(**asked))
    assert models == [convert_here(network, example, "piece").SerializeToString()] * 2


def _registry() -> type:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return ONNXRegistry
