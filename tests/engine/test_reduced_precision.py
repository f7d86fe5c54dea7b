"""Engines in bfloat16 and 8-bit integers: close to the network, thresholds as asked, what they need."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gati.engine.backends import BACKENDS, GraphBackend, get_backend
from gati.engine.engine import Engine
from gati.errors import BackendError
from gati.evaluation.evaluate import evaluate_engine
from gati.model.data import load_data
from tests.engine.networks import BLOCKS, traced_network
from tests.engine.served import PREPROCESSING, images
from tests.engine.test_graph_backends import exits, requests, scores

bf16 = pytest.mark.skipif(
    not BACKENDS["openvino-bf16"].installed(), reason="no OpenVINO, or no processor that computes in bfloat16"
)
int8 = pytest.mark.skipif(not BACKENDS["openvino-int8"].installed(), reason="no OpenVINO or no NNCF")
KEPT = ("exits.zip", "base.zip")


def quantised(folder: Path, *thresholds: float) -> tuple[Path, Path]:
    """The networks that `gati compose` keeps for an engine in 8-bit integers."""
    backend = get_backend("openvino-int8", calibration=requests(60))
    assert isinstance(backend, GraphBackend)
    for name, leaving in zip(KEPT, (exits(*thresholds), []), strict=True):
        (model,) = backend.assembled(traced_network(), [leaving], "logits")
        (folder / name).write_bytes(model)
    return folder / KEPT[0], folder / KEPT[1]


@bf16
def test_bfloat16_is_close_to_the_network() -> None:
    traced = traced_network()
    engine = Engine(traced, exits(1e30), backend="openvino-bf16")
    assert engine.precision == "bf16"
    for x in requests(20).split(1):
        for (answer,) in (engine(x), engine.base(x)):
            assert torch.allclose(answer.probabilities, traced.base(x).softmax(1)[0], atol=0.03)


@pytest.mark.slow
@int8
def test_integers_are_close_to_the_network_and_leave_at_the_threshold_asked_for(tmp_path: Path) -> None:
    traced, x = traced_network(), requests(60)
    middle = float(scores(traced, exits(0.0)[0], x).sort().values[29:31].mean())
    engine = Engine(traced, exits(middle), backend="openvino-int8", graphs=quantised(tmp_path, middle))
    answers = engine(x)
    left = sum(answer.exit == BLOCKS[0] for answer in answers)
    assert 20 <= left <= 40, "half of the scores lie above the threshold, but for rounding"
    for answer, own in zip(engine.base(x), traced.base(x).softmax(1), strict=True):
        assert torch.allclose(answer.probabilities, own, atol=0.1)


@pytest.mark.slow
@int8
@pytest.mark.parametrize(("threshold", "exit"), [(-1e30, BLOCKS[0]), (1e30, "base")])
def test_thresholds_are_put_into_a_network_that_was_quantised_without_them(
    tmp_path: Path, threshold: float, exit: str
) -> None:
    kept = quantised(tmp_path, threshold, threshold)
    engine = Engine(traced_network(), exits(threshold, threshold), backend="openvino-int8", graphs=kept)
    assert {answer.exit for answer in engine(requests(5))} == {exit}


@pytest.mark.slow
@int8
def test_several_settings_share_one_quantised_network() -> None:
    backend = get_backend("openvino-int8", calibration=requests(20))
    assert isinstance(backend, GraphBackend)
    first, second = backend.assembled(traced_network(), [exits(0.2), exits(0.7)], "logits")
    weights = [zipfile.ZipFile(io.BytesIO(model)).read("model.bin") for model in (first, second)]
    assert len(weights[0]) == len(weights[1])
    assert sum(a != b for a, b in zip(*weights, strict=True)) <= 8, "they differ in their threshold alone"


@int8
def test_without_a_quantised_network_the_message_says_what_to_do() -> None:
    with pytest.raises(
        BackendError, match="'openvino-int8' has no stored quantised network .*gati compose again"
    ):
        Engine(traced_network(), exits(0.5), backend="openvino-int8")


def test_without_nncf_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.util import find_spec

    monkeypatch.setattr(
        "gati.engine.backends.base.find_spec", lambda name: None if name == "nncf" else find_spec(name)
    )
    with pytest.raises(BackendError, match=r"needs nncf, .*pip install 'gati\[int8\]'"):
        get_backend("openvino-int8")
    assert not BACKENDS["openvino-int8"].installed()


@bf16
def test_agreement_is_measured_against_the_network_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own whole network is no judge of itself."""
    engine = Engine(traced_network(), backend="openvino-bf16")
    np.savez(tmp_path / "data.npz", images=images(30))
    data = load_data(str(tmp_path / "data.npz"), PREPROCESSING, what="requests")
    wrong = engine.reference(data.images(range(30)))
    assert evaluate_engine(engine, data).agreement >= 0.8
    monkeypatch.setattr(Engine, "reference", lambda self, x: (wrong[: len(x)] + 1) % 4)
    assert evaluate_engine(engine, data).agreement <= 0.2
