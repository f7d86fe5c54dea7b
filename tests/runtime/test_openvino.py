"""The OpenVINO backend: the network's own answers, exact misses, work saved, one graph a stretch."""

from __future__ import annotations

import pytest
import torch

from gati.errors import BackendError
from gati.runtime.backends import get_backend
from gati.runtime.engine import Engine
from gati.runtime.exits import EngineExit
from tests.runtime.networks import BLOCKS, Cache, traced_network

openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")


def requests(count: int) -> torch.Tensor:
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(3))


def exits(*thresholds: float) -> list[EngineExit]:
    torch.manual_seed(0)
    return [
        EngineExit(block, Cache().eval(), threshold)
        for block, threshold in zip(BLOCKS, thresholds, strict=False)
    ]


def test_the_base_model_gives_the_networks_own_answers() -> None:
    traced = traced_network()
    engine = Engine(traced, backend="openvino")
    for x in requests(20).split(1):
        (answer,) = engine.base(x)
        assert torch.allclose(answer.probabilities, traced.base(x).softmax(1)[0], atol=1e-5)
        assert answer.exit == "base"


def test_a_miss_is_the_base_models_answer_but_for_rounding() -> None:
    """A compiler may fuse a cut network otherwise than a whole one; bit for bit is the torch backend's promise."""
    engine = Engine(traced_network(), exits(1e30, 1e30, 1e30), backend="openvino")
    for x in requests(20).split(1):
        (answer,), (base,) = engine(x), engine.base(x)
        assert answer.exit == "base"
        assert torch.allclose(answer.probabilities, base.probabilities, rtol=0, atol=1e-6)


def test_exits_probabilities_and_classes_are_those_of_the_torch_backend() -> None:
    """Thresholds lie between the scores, so that rounding cannot decide."""
    traced, x = traced_network(), requests(60)
    scores = torch.cat([traced_scores(traced, leaving, x) for leaving in exits(0.0, 0.0)]).view(2, -1)
    halves = [float(score.sort().values[29:31].mean()) for score in scores]
    fast, plain = (Engine(traced, exits(*halves), backend=backend) for backend in ("openvino", "torch"))
    left = set()
    for ours, theirs in zip(fast(x), plain(x), strict=True):
        assert ours.exit == theirs.exit
        assert ours.class_index == theirs.class_index
        assert torch.allclose(ours.probabilities, theirs.probabilities, atol=1e-5)
        left.add(ours.exit)
    assert len(left) == 3


def traced_scores(traced, leaving: EngineExit, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return leaving.cache(traced.cut([leaving.block])[0].run(x.clone())[0])[1]


def test_an_input_gets_the_same_answer_whatever_its_batch() -> None:
    engine = Engine(traced_network(), exits(0.5, 0.4), backend="openvino")
    x = requests(9)
    together, alone = engine(x), [engine(row)[0] for row in x.split(1)]
    for one, other in zip(together, alone, strict=True):
        assert one.exit == other.exit
        assert torch.equal(one.probabilities, other.probabilities)


def test_an_answer_does_not_change_when_the_next_request_comes() -> None:
    """The engine's tensors are used again; what was handed out must not be them."""
    engine = Engine(traced_network(), exits(0.3), backend="openvino")
    first, second = requests(2).split(1)
    (answer,) = engine(first)
    kept = answer.probabilities.clone()
    engine(second)
    engine.base(second)
    assert torch.equal(answer.probabilities, kept)


def test_after_a_hit_the_rest_of_the_network_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(traced_network(), exits(-1.0), backend="openvino")
    assert engine._requests is not None
    monkeypatch.setattr(engine._requests, "_last_infer", lambda: pytest.fail("the rest was run"))
    assert engine(requests(1))[0].exit == BLOCKS[0]


def test_nan_scores_are_misses() -> None:
    class Undecided(Cache):
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            probabilities, score = super().forward(hidden)
            return probabilities, score * float("nan")

    engine = Engine(traced_network(), [EngineExit(BLOCKS[0], Undecided().eval(), -1e30)], backend="openvino")
    assert engine(requests(1))[0].exit == "base"


def test_overlapped_lookups_are_refused_in_one_line() -> None:
    beside = [EngineExit(BLOCKS[0], Cache().eval(), 0.5, "overlapped")]
    with pytest.raises(BackendError, match="backend 'openvino' looks up inside its graphs; compose with"):
        Engine(traced_network(), beside, backend="openvino")


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gati.runtime.backends.openvino.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"needs OpenVINO: pip install 'gati\[openvino\]'"):
        get_backend("openvino")


def test_segments_may_be_run_on_tensors_of_the_callers_own() -> None:
    traced, x = traced_network(), requests(2).split(1)
    segments = get_backend("openvino").path(traced, [BLOCKS[1]]).segments
    for request in x:
        carried = tuple(tensor.clone() for tensor in segments[0].run(request))
        assert torch.allclose(segments[1].run(*carried), traced.base(request), atol=1e-5)
