"""An exit at the network's input, before anything has run: on every backend, alone and with a later one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gati.caches import LearnedCache
from gati.engine.backends import BACKENDS, GraphBackend
from gati.engine.backends.openvino import OpenVinoInt8Backend
from gati.engine.concurrent import ConcurrentEngine
from gati.engine.engine import Engine
from gati.engine.exits import BASE, EngineExit, Prediction
from gati.model.segments import INPUT, TracedModel, trace
from gati.types import Placement
from tests.engine.networks import BLOCKS, CLASSES, Cache, Network, inputs, ready

SHAPE = (1, 8, 8)
LATER = BLOCKS[1]
BACKEND_NAMES = ("torch", "torch-compile", "onnxruntime", "openvino", "openvino-bf16", "openvino-int8")
on_every_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(not BACKENDS[name].installed(), reason=f"{name} does not run here"),
        )
        for name in BACKEND_NAMES
    ],
)


class InPlaceNetwork(Network):
    """Doubles what it is given where it lies."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        result: Tensor = super().forward(x)
        return result


def requests(count: int, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(count, 1, 1, 1, generator=generator) * 4.0
    return torch.randn(count, *SHAPE, generator=generator) * size


def traced_network(kind: type[nn.Module] = Network) -> TracedModel:
    torch.manual_seed(0)
    return trace(ready(kind()), requests(2), (INPUT, *BLOCKS))


def student(threshold: float, placement: Placement = "inline") -> EngineExit:
    """An untrained student that is sure of some inputs and not of others."""
    torch.manual_seed(3)
    cache = LearnedCache("student(4)", SHAPE, CLASSES, "maximum-probability")
    last = [layer for layer in cache.predictor.modules() if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        last.weight.mul_(400.0)
    return EngineExit(INPUT, cache, threshold, placement, "student(4)", cache.memory_bytes)


def later(threshold: float) -> EngineExit:
    torch.manual_seed(1)
    return EngineExit(LATER, ready(Cache()), threshold, "inline", "fake", 100)


@torch.inference_mode()
def between_scores(leaving: EngineExit, hidden: Tensor, share: float) -> float:
    """A threshold that so many reach, in the middle of the widest gap there: rounding decides nothing."""
    scores = leaving.cache(hidden)[1].sort().values
    first, last = round(len(scores) * (0.9 - share)), round(len(scores) * (1.1 - share))
    gaps = scores.diff()[max(first, 0) : last]
    at = max(first, 0) + int(gaps.argmax())
    return float((scores[at] + scores[at + 1]) / 2)


def engine_of(traced: TracedModel, exits: list[EngineExit], backend: str, folder) -> Engine:
    """int8 runs only graphs that were kept: quantised here on inputs like those to come."""
    graphs = None
    kind = BACKENDS[backend]
    if issubclass(kind, GraphBackend) and kind.calibrated:
        graphs = (folder / "exits.zip", folder / "base.zip")
        for path, chosen in zip(graphs, (exits, []), strict=True):
            (model,) = OpenVinoInt8Backend(requests(100)).assembled(traced, [chosen], "logits")
            path.write_bytes(model)
    return Engine(traced, exits, backend=backend, graphs=graphs)


def classes(answers: list[Prediction]) -> list[int]:
    return [answer.class_index for answer in answers]


@pytest.mark.slow
@on_every_backend
def test_all_leave_at_the_input_with_what_the_student_says(backend: str, tmp_path) -> None:
    x, leaving = requests(40), student(-1e30)
    with torch.inference_mode():
        alone = leaving.cache(x)[0]
    answers = engine_of(traced_network(), [leaving], backend, tmp_path)(x)
    assert {answer.exit for answer in answers} == {INPUT}
    given = torch.stack([answer.probabilities for answer in answers])
    exact = BACKENDS[backend].precision == "f32"
    torch.testing.assert_close(given, alone, rtol=0, atol=1e-4 if exact else 0.3)
    if exact:
        assert classes(answers) == alone.argmax(1).tolist()


@pytest.mark.slow
@on_every_backend
@pytest.mark.parametrize("kind", [Network, InPlaceNetwork])
def test_a_miss_is_the_base_models_answer(backend: str, kind: type[nn.Module], tmp_path) -> None:
    x = requests(10)
    before = x.clone()
    engine = engine_of(traced_network(kind), [student(1e30)], backend, tmp_path)
    answers, base = engine(x), engine.base(x)
    assert torch.equal(x, before), "the caller's own inputs were written to"
    assert {answer.exit for answer in answers} == {BASE}
    same = 1e-6 if BACKENDS[backend].precision == "f32" else 0.1
    for answer, whole in zip(answers, base, strict=True):
        torch.testing.assert_close(answer.probabilities, whole.probabilities, rtol=0, atol=same)


@pytest.mark.parametrize("kind", [Network, InPlaceNetwork])
def test_on_torch_a_miss_is_the_base_models_answer_bit_for_bit(kind: type[nn.Module]) -> None:
    engine = Engine(traced_network(kind), [student(1e30), later(1e30)])
    for x in requests(10).split(1):
        (answer,), (whole,) = engine(x.clone()), engine.base(x.clone())
        assert torch.equal(answer.probabilities, whole.probabilities)


@pytest.mark.slow
@on_every_backend
@pytest.mark.parametrize("kind", [Network, InPlaceNetwork])
def test_an_exit_at_the_input_and_a_later_one(backend: str, kind: type[nn.Module], tmp_path) -> None:
    """Who leaves where is worked out here from the lookups themselves."""
    if BACKENDS[backend].precision != "f32":
        pytest.skip("thresholds are chosen between float32 scores")
    traced, x = traced_network(kind), requests(60)
    first = student(between_scores(student(0.0), x, 0.4))
    with torch.inference_mode():
        hidden = traced.cut([LATER])[0].run(x.clone())[0]
        second = later(between_scores(later(0.0), hidden, 0.5))
        at_input, at_block = first.cache(x), second.cache(hidden)
        whole = traced.base(x.clone())
    expected = [
        (INPUT, int(at_input[0][row].argmax()))
        if at_input[1][row] >= first.threshold
        else (LATER, int(at_block[0][row].argmax()))
        if at_block[1][row] >= second.threshold
        else (BASE, int(whole[row].argmax()))
        for row in range(len(x))
    ]
    assert {name for name, _ in expected} == {INPUT, LATER, BASE}
    engine = engine_of(traced, [second, first], backend, tmp_path)  # in forward order whatever is given
    together = engine(x)
    one_by_one = [engine(row)[0] for row in x.split(1)]
    assert [(answer.exit, answer.class_index) for answer in together] == expected
    assert [(answer.exit, answer.class_index) for answer in one_by_one] == expected


@pytest.mark.parametrize("kind", [Network, InPlaceNetwork])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_overlapped_with_the_network(kind: type[nn.Module], share: float) -> None:
    traced, x = traced_network(kind), requests(30)
    threshold = {0.0: 1e30, 0.5: between_scores(student(0.0), x, 0.5), 1.0: -1e30}[share]
    inline = Engine(traced, [student(threshold)])
    with Engine(traced, [student(threshold, "overlapped")]) as engine:
        for row in x.split(1):
            (ours,), (theirs,) = engine(row.clone()), inline(row.clone())
            assert (ours.exit, ours.class_index) == (theirs.exit, theirs.class_index)
            assert torch.equal(ours.probabilities, theirs.probabilities)


@pytest.mark.parametrize("kind", [Network, InPlaceNetwork])
def test_many_clients_in_batches(kind: type[nn.Module]) -> None:
    traced, x = traced_network(kind), requests(64)
    engine = Engine(traced, [student(between_scores(student(0.0), x, 0.5)), later(0.6)])
    alone = [engine(row)[0] for row in x.split(1)]
    with ConcurrentEngine(engine, workers=2) as concurrent:
        waiting = [concurrent.submit(row) for row in x.split(1)]
        answers = [each.result() for each in waiting]
    assert [(a.exit, a.class_index) for a in answers] == [(a.exit, a.class_index) for a in alone]


def test_the_inputs_of_other_tests_are_of_very_different_size() -> None:
    """Else a student would be sure of all or none, and the tests above would show little."""
    with torch.inference_mode():
        scores = student(0.0).cache(requests(60))[1]
    assert scores.min() < 0.6 < 0.9 < scores.max()
    assert inputs(1).shape[1] == SHAPE[0]
