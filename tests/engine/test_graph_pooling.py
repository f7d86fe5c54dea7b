"""Operators of graphs against PyTorch's own: pooling over cells that overlap, thresholds as float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gati.engine.graph.pooling import average_pool, maximum_pool, without_adaptive_pooling
from gati.engine.graph.stages import build_stages, float32_at_least
from tests.engine.networks import BLOCKS, CLASSES, traced_network
from tests.engine.test_graph_backends import exits, requests

sizes = st.integers(1, 9)


@given(height=sizes, width=sizes, rows=sizes, columns=sizes, seed=st.integers(0, 999))
def test_pooling_is_that_of_pytorch(height: int, width: int, rows: int, columns: int, seed: int) -> None:
    x = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(average_pool(x, (rows, columns)), F.adaptive_avg_pool2d(x, (rows, columns)))
    found, _ = maximum_pool(x, (rows, columns))
    torch.testing.assert_close(found, F.adaptive_max_pool2d(x, (rows, columns)))


def test_a_program_keeps_its_answers_without_adaptive_pooling() -> None:
    module = nn.Sequential(nn.AdaptiveAvgPool2d((3, 2)), nn.AdaptiveMaxPool2d(2), nn.Flatten()).eval()
    x = torch.randn(1, 2, 7, 5, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(module, (x,))
    written_out = without_adaptive_pooling(program)
    assert "adaptive" in str(program.graph) and "adaptive" not in str(written_out.graph)
    torch.testing.assert_close(written_out.module()(x), module(x))
    plain = torch.export.export(nn.Sequential(nn.ReLU()).eval(), (x,))
    assert without_adaptive_pooling(plain) is plain


@given(threshold=st.floats(-1e30, 1e30), score=st.floats(-(2.0**100), 2.0**100, width=32))
def test_a_float32_score_reaches_both_thresholds_or_neither(threshold: float, score: float) -> None:
    at_least = float32_at_least(threshold)
    assert float(np.float32(at_least)) == at_least >= threshold
    assert (score >= at_least) == (score >= threshold)
    nearer = np.nextafter(np.float32(threshold), np.float32(math.inf if threshold > at_least else -math.inf))
    assert (float(nearer) >= at_least) == (float(nearer) >= threshold)


@pytest.mark.parametrize("cuts", [(), (BLOCKS[2],)])
def test_stages_in_turn_are_the_network(cuts: tuple[str, ...]) -> None:
    traced, (x,) = traced_network(), requests(1).split(1)
    stages = build_stages(traced, exits(0.4, 0.5), "logits", cuts)
    assert stages.thresholds == (float32_at_least(0.4), 0.5) and stages.classes == CLASSES
    assert len(stages.segments) == len(stages.lookups) == 3 + len(cuts)
    *early, (probabilities, score) = stages.trail(x)
    assert score is None and len(early) == 2
    torch.testing.assert_close(probabilities, traced.base(x).softmax(1)[0])
    for (found, scored), leaving in zip(early, exits(0.4, 0.5), strict=True):
        hidden = traced.cut([leaving.block])[0].run(x.clone())[0]
        expected, reached = leaving.cache(hidden)
        torch.testing.assert_close(found, expected[0])
        torch.testing.assert_close(scored, reached[0])
