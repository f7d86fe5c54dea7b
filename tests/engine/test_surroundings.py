"""An engine answers alike whatever the program around it has set, and however inputs lie in memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gati.engine.backends import BACKENDS, openvino
from gati.engine.concurrent import ConcurrentEngine
from gati.engine.engine import Engine
from gati.engine.exits import Prediction
from gati.engine.graph.stages import float32_at_least
from gati.errors import BackendError
from gati.model.inputs import InputPart, TensorInputs
from gati.model.preprocess import Preprocessing
from gati.model.segments import trace
from gati.types import Placement
from tests.engine.networks import CLASSES, exits, inputs, network, ready, selective_exits, traced_network
from tests.waiting import LONG_S

ROWS = 6


def same(found: list[Prediction], expected: list[Prediction]) -> bool:
    return all(
        ours.exit == theirs.exit and torch.equal(ours.probabilities, theirs.probabilities)
        for ours, theirs in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("placement", ["inline", "overlapped"])
def test_the_callers_autocast_changes_no_answer(placement: Placement) -> None:
    traced, x = traced_network(), inputs(ROWS)
    leaving = selective_exits(traced, placement)

    def answers(engine: Engine) -> list[Prediction]:
        return [*engine(x), *engine(x[:1]), *engine.inline(x[:1]), *engine.base(x)]

    with Engine(traced, leaving) as engine:
        expected, classes = answers(engine), engine.reference(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert same(answers(engine), expected)
            assert torch.equal(engine.reference(x), classes)
            assert torch.is_autocast_enabled("cpu"), "it stays that of the caller"
            with Engine(traced, leaving) as made_inside:
                assert same(answers(made_inside), expected)


def test_a_network_traced_with_autocast_on_is_the_same() -> None:
    plain, x = traced_network(), inputs(ROWS)
    with torch.autocast("cpu", torch.bfloat16):
        traced = traced_network(network())
    leaving = selective_exits(plain)
    assert same(Engine(traced, leaving)(x), Engine(plain, leaving)(x))


class Convolutions(nn.Module):
    """Whose kernels depend on the order of channels in memory."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=4), nn.ReLU()
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x).mean((2, 3)))
        return result


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_whose_channels_lie_together_get_the_same_answers(channels: int) -> None:
    """As what a program has turned with `permute`. With one channel, they count as contiguous."""
    torch.manual_seed(0)
    turned = torch.rand(ROWS, 9, 9, channels).permute(0, 3, 1, 2)
    usual = turned.clone(memory_format=torch.contiguous_format)
    engine = Engine(trace(ready(Convolutions(channels)), usual, []))
    for one, other in ((turned, usual), (turned[:1], usual[:1])):
        assert same(engine(one), engine(other))
        assert same(engine.base(one), engine.base(other))


def test_a_tensor_with_gradients_is_an_input_like_others() -> None:
    part = InputPart("inputs", "float32", (5,), -1.0, 1.0)
    preprocessing = Preprocessing(mean=(0.0,), std=(1.0,), channels=1, tensors=TensorInputs((part,)))
    torch.manual_seed(0)
    engine = Engine(trace(ready(nn.Linear(5, CLASSES)), torch.rand(2, 5), []), preprocessing=preprocessing)
    x = torch.rand(ROWS, 5, requires_grad=True)
    assert same(engine(x), engine(x.detach()))
    with ConcurrentEngine(engine, workers=1) as shared:
        assert same([shared(x[:1])], engine(x[:1].detach()))


def test_an_input_may_be_changed_while_it_waits() -> None:
    """As a buffer for frames that is used again for the next one."""
    engine = Engine(traced_network(), exits((0.4, 0.4, 0.4)))
    first, second = inputs(2).split(1)
    expected = [engine(first)[0], engine(second)[0]]
    assert expected[0].class_index != expected[1].class_index or not same(expected[:1], expected[1:])
    with ConcurrentEngine(engine, workers=1) as shared:
        buffer = first.clone()
        with shared._work.changed:  # no worker takes an input meanwhile
            waiting = [shared.submit(buffer)]
            buffer.copy_(second)
            waiting.append(shared.submit(buffer))
            buffer.zero_()
        for ours, theirs in zip([each.result(LONG_S) for each in waiting], expected, strict=True):
            assert ours.exit == theirs.exit
            torch.testing.assert_close(ours.probabilities, theirs.probabilities)


def test_an_input_that_stays_as_it_is_is_not_copied() -> None:
    x = inputs(1)
    engine = Engine(traced_network(), exits((0.4, 0.4, 0.4)))
    with ConcurrentEngine(engine, workers=1) as shared:
        with shared._work.changed:  # no worker takes an input meanwhile
            answer = shared.submit(x, own=True)
            assert shared._work.queues[0][0].x.data_ptr() == x.data_ptr()
        assert answer.result(LONG_S).exit == engine(x)[0].exit


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


graph_backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(not BACKENDS[name].installed(), reason=f"{name} is not installed")
        )
        for name in ("onnxruntime", "openvino")
    ],
)


@pytest.mark.slow
@pytest.mark.skipif(not BACKENDS["onnxruntime"].installed(), reason="onnxruntime is not installed")
@pytest.mark.parametrize(
    "setting", [torch.device("meta"), torch.autocast("cpu", torch.bfloat16)], ids=["device", "autocast"]
)
def test_what_the_program_has_set_changes_no_graph(setting: AbstractContextManager[Any]) -> None:
    traced, x = traced_network(), inputs(ROWS)
    leaving = selective_exits(traced)[:1]
    expected = Engine(traced, leaving, backend="onnxruntime")(x)
    with setting:
        assert same(Engine(traced, leaving, backend="onnxruntime")(x), expected)


def test_a_threshold_is_rounded_up_whatever_numbers_the_program_computes_in() -> None:
    """Half of all float64 numbers are nearest to a float32 below them."""
    with default_dtype(torch.float64):
        assert float32_at_least(0.7000000000000001) == 0.7000000476837158


@pytest.mark.parametrize("threshold", [1e300, 3.4028235e38, 1e-40, 1e-300])
def test_a_threshold_may_be_large_or_small_though_the_program_has_numpy_raise(threshold: float) -> None:
    with np.errstate(all="raise"):
        found = float32_at_least(threshold)
    assert found >= threshold and found == np.float32(found)


@pytest.mark.slow
@graph_backends
def test_a_runtime_that_cannot_be_imported_is_told_in_one_line(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose libraries are missing or were built for another NumPy."""
    (tmp_path / f"{backend}.py").write_text("raise ImportError('libnone.so: cannot open\\nno such file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(openvino, "_CORES", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == backend]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(BackendError, match=f"package {backend} is installed, but .*libnone.*again") as caught:
        Engine(traced_network(), backend=backend)
    assert "\n" not in str(caught.value)
    if backend == "openvino":
        assert not BACKENDS["openvino-bf16"].installed()


def test_an_engine_that_is_gone_leaves_no_worker_and_no_cores_behind() -> None:
    """As where a cell of a notebook that loads one runs again."""
    before, threads = set(threading.enumerate()), torch.get_num_threads()
    engine = Engine(traced_network(), exits((0.5,) * 3, "overlapped"))
    engine(inputs(1))
    (worker,) = set(threading.enumerate()) - before
    del engine
    worker.join(LONG_S)
    assert not worker.is_alive()
    assert torch.get_num_threads() == threads
