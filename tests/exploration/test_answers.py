"""What the base model answers: equal on every engine, and the fastest one chosen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from gati.errors import BackendError
from gati.exploration import answers
from gati.exploration.answers import BaseAnswers, fastest_engine, open_engine
from gati.exploration.precision import bfloat16_pays
from tests.exploration.networks import Net


@pytest.fixture
def net() -> Net:
    torch.manual_seed(1)
    return Net().eval().requires_grad_(False)


def test_logits_are_shifted_and_nothing_else(net: Net) -> None:
    images = torch.randn(5, 1, 8, 8)
    found = BaseAnswers(net, "logits")(images)
    assert torch.equal(found.amax(1), torch.zeros(5))
    torch.testing.assert_close(found.softmax(1), net(images).softmax(1))


def test_probabilities_become_their_logarithms(net: Net) -> None:
    images = torch.randn(5, 1, 8, 8)
    found = BaseAnswers(nn.Sequential(net, nn.Softmax(1)), "probabilities")(images)
    torch.testing.assert_close(found.softmax(1), net(images).softmax(1))


def test_pooled_hidden_outputs_follow_the_logits_and_no_hook_stays(net: Net) -> None:
    images = torch.randn(5, 1, 8, 8)
    rows = BaseAnswers(net, "logits", "blocks.2")(images)
    hidden = net.blocks[:3](torch.relu(net.stem(images)))
    torch.testing.assert_close(rows[:, 10:], hidden.mean((2, 3)))
    torch.testing.assert_close(rows[:, :10], BaseAnswers(net, "logits")(images))
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, "blocks.3"])
@pytest.mark.parametrize("name", answers.ENGINES)
def test_every_engine_gives_the_same_answers(net: Net, name: str, block: str | None) -> None:
    pytest.importorskip("openvino")
    if name == "openvino-bf16" and not bfloat16_pays():
        pytest.skip("this processor does not compute in bfloat16")
    images = torch.randn(16, 1, 8, 8)
    base = BaseAnswers(net, "logits", block)
    engine = open_engine(name, base, images)
    tolerance = 1e-4 if name == "openvino" else 5e-2
    torch.testing.assert_close(engine(images), base(images), rtol=tolerance, atol=tolerance)
    again = engine(torch.randn(16, 1, 8, 8))
    assert torch.equal(engine(images), engine(images)) and not torch.equal(again, engine(images))


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, "blocks.3"])
def test_8_bit_integers_answer_nearly_the_same_and_each_time_alike(net: Net, block: str | None) -> None:
    """A training that is resumed opens its engine again."""
    pytest.importorskip("nncf")
    torch.manual_seed(2)
    images = torch.randn(64, 1, 8, 8)
    base = BaseAnswers(net, "logits", block)
    engine = open_engine(answers.IN_8_BITS, base, images)
    found, expected = engine(images), base(images)
    assert found.shape == expected.shape and not torch.equal(found, expected)
    differs = found[:, :10].softmax(1) - expected[:, :10].softmax(1)
    assert float(differs.abs().mean()) < 0.02
    assert torch.equal(open_engine(answers.IN_8_BITS, base, images)(images), found)


def test_8_bit_integers_that_change_the_class_of_many_inputs_are_refused(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nncf")
    images, base = torch.randn(16, 1, 8, 8), BaseAnswers(net, "logits")
    monkeypatch.setattr(answers, "in_8_bit_integers", lambda model, batches: model)
    compiled = answers._compiled
    monkeypatch.setattr(answers, "_compiled", lambda *given: lambda images: -compiled(*given)(images))
    with pytest.raises(BackendError, match="engine 'openvino-int8' gives many inputs another class"):
        open_engine(answers.IN_8_BITS, base, images)


def test_8_bit_integers_that_fail_as_they_run_are_not_available(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then another engine answers; the error ended the training."""
    pytest.importorskip("nncf")

    def failing(images: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(answers, "in_8_bit_integers", lambda model, batches: model)
    monkeypatch.setattr(answers, "_compiled", lambda *given: failing)
    with pytest.raises(BackendError, match="'openvino-int8' cannot run the network: RuntimeError: no kernel"):
        open_engine(answers.IN_8_BITS, BaseAnswers(net, "logits"), torch.randn(16, 1, 8, 8))


def test_few_inputs_at_a_time_calibrate_8_bit_integers(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every layer returns for these is kept at a time: for a whole batch, it could fill the memory."""
    pytest.importorskip("nncf")
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        answers, "in_8_bit_integers", lambda model, batches: shapes.extend(x.shape for x in batches) or model
    )
    for count, expected in ((19, [(8, 1, 8, 8)] * 2), (5, [(5, 1, 8, 8)])):
        images, base = torch.randn(count, 1, 8, 8), BaseAnswers(net, "logits")
        assert open_engine(answers.IN_8_BITS, base, images)(images).shape == (count, 10)
        assert shapes == expected
        shapes.clear()


class _Residual(nn.Module):
    """Two residual blocks of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2)]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [2, 8, 9])
def test_few_inputs_at_a_time_do_not_end_the_process(inputs: int) -> None:
    """OpenVINO 2026.4 crashes where it fuses such layers for up to eight rows."""
    pytest.importorskip("openvino")
    network, x = _Residual().eval(), torch.randn(inputs, 64)
    answered = open_engine("openvino", BaseAnswers(network, "logits"), x)(x)
    torch.testing.assert_close(answered, BaseAnswers(network, "logits")(x), rtol=1e-4, atol=1e-4)


def test_an_engine_that_is_not_there_says_so(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    images, base = torch.randn(4, 1, 8, 8), BaseAnswers(net, "logits")
    with pytest.raises(BackendError, match=r"unknown engine 'tvm' .* choose one of openvino-bf16"):
        open_engine("tvm", base, images)
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="engine 'openvino' needs openvino, not installed here"):
        open_engine("openvino", base, images)
    monkeypatch.setattr(answers, "find_spec", lambda name: None if name == "nncf" else name)
    with pytest.raises(BackendError, match=r"'openvino-int8' needs nncf, .*: pip install 'gati\[int8\]'"):
        open_engine(answers.IN_8_BITS, base, images)
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    assert fastest_engine(base, images)[0] == "torch"


class _Ticks:
    """A clock for which each engine takes the given seconds a batch."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self.now, self.seconds, self.begins = 0.0, seconds, True

    def __call__(self) -> float:
        if not self.begins:
            self.now += next(self.seconds)
        self.begins = not self.begins
        return self.now


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param((1.0, 1.0, 1.0), "openvino-bf16", id="all alike"),
        pytest.param((1.2, 1.0, 1.0), "openvino-bf16", id="another a little faster"),
        pytest.param((2.0, 1.0, 0.9), "openvino", id="two clearly faster"),
        pytest.param((2.0, 2.0, 1.0), "torch", id="one clearly faster"),
    ],
)
def test_the_first_engine_that_none_clearly_outruns_is_taken(
    net: Net, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], expected: str
) -> None:
    def pretend(name: str, base: BaseAnswers, example: Tensor) -> answers.Engine:
        return base

    monkeypatch.setattr(answers, "open_engine", pretend)
    ticks = _Ticks(each for each in seconds for _ in range(3))
    assert fastest_engine(BaseAnswers(net, "logits"), torch.randn(8, 1, 8, 8), ticks)[0] == expected


def test_an_engine_that_computes_something_else_is_not_taken(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_but_for_torch(name: str, base: BaseAnswers, example: Tensor) -> answers.Engine:
        return base if name == "torch" else lambda images: -base(images)

    monkeypatch.setattr(answers, "open_engine", wrong_but_for_torch)
    assert fastest_engine(BaseAnswers(net, "logits"), torch.randn(8, 1, 8, 8))[0] == "torch"
