"""A vision transformer and a ConvNeXt of timm go all the way, from explore to serve."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from torch import Tensor

import gati
from gati.exploration import candidates, stages
from services.inference.service import InferenceService
from services.inference.settings import InferenceSettings
from tests.services.engines import reply_of, served

# not imported here: on some builds of torch torchvision can only be imported through `gati.model.source`
pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: the extra gati[vision]")

NETWORKS = {
    "vit_tiny_patch16_224": "img_size=32, patch_size=8, depth=4",
    "convnext_atto": "depths=(1, 1, 2, 1), dims=(16, 32, 64, 128)",
}
BLOCKS = {"vit_tiny_patch16_224": ["blocks.0", "blocks.2"], "convnext_atto": ["stages.1.blocks.0"]}


def pictures(path: Path, count: int, seed: int) -> Path:
    """Four coloured squares a side each, so that even random weights tell them apart."""
    squares = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    np.savez(path, images=squares.repeat(8, axis=1).repeat(8, axis=2))
    return path


def asked(library: Path, inputs: Tensor) -> dict[str, Any]:
    """What a server with this library replies to `inputs` [n, ...]."""
    settings = InferenceSettings(name="network", library=library, threads=1, workers=1, unguarded=True)
    given = {
        "name": "input",
        "datatype": "FP32",
        "shape": list(inputs.shape),
        "data": inputs.flatten().tolist(),
    }

    with served(InferenceService(settings)) as address:
        reply = reply_of("network", address, "POST", "/v2/models/network/infer", json={"inputs": [given]})
    assert reply.status_code == 200, reply.text
    return {output["name"]: output["data"] for output in reply.json()["outputs"]}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: the extra gati[vision]")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_timm_goes_all_the_way(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "too_slow", lambda *arguments: "")
    monkeypatch.setattr(stages, "LEAST_EXIT_STEPS", 10)
    made = f"timm.create_model({name!r}, num_classes=4, {NETWORKS[name]})"
    (tmp_path / "own.py").write_text(f"import timm\ndef build():\n    return {made}\n")
    held, test = pictures(tmp_path / "val.npz", 200, 0), pictures(tmp_path / "test.npz", 16, 1)
    gati.explore(
        f"{tmp_path / 'own.py'}:build",
        data=held,
        out=tmp_path / "library",
        blocks=",".join(BLOCKS[name]),
        variants=["grid(16)"],
        epochs=0.1,
        mean=(0.5,),
        std=(0.25,),
    )
    chosen = gati.compose(tmp_path / "library", accuracy=0.5, confidence=None, backend="torch", slowdown=5.0)
    evaluation = gati.evaluate(tmp_path / "library", test)
    assert evaluation.n == 16
    assert len(evaluation.exits) == len(chosen.exits)
    exported = gati.export(tmp_path / "library", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    with gati.load(tmp_path / "library") as engine:
        with np.load(test) as arrays:
            inputs = engine.preprocessing(arrays["images"])
        answers = engine(inputs)
        for answer, row in zip(answers, inputs, strict=True):
            found = session.run(None, {session.get_inputs()[0].name: row[None].numpy()})
            assert int(np.argmax(found[0])) == answer.class_index
    assert exported.input_shape == (1, *inputs.shape[1:])
    replied = asked(tmp_path / "library", inputs)
    assert replied["class_index"] == [answer.class_index for answer in answers]
    assert replied["exit"] == [answer.exit for answer in answers]
