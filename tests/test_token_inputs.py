"""A transformer on ids of tokens, all the way: explore, compose, evaluate, export, serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gati
from gati.composition.load import Served, open_served
from gati.errors import BlockError, DataError, ModelError, VariantError
from tests.token_networks import LENGTH, sentences

MODEL = "tests.token_networks:small"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for number, name in enumerate(("val", "test")):
        np.savez(folder / f"{name}.npz", **sentences(900 - 600 * number, seed=number))
    gati.explore(
        MODEL,
        data=str(folder / "val.npz"),
        out=folder / "library",
        blocks="encoder.layers.0",
        epochs=1,
        variants=["grid(64)"],
    )
    gati.compose(folder / "library", accuracy=0.8, backend="torch")
    return folder


@pytest.fixture(scope="module")
def served(library: Path) -> Served:
    return open_served(library / "library")


def test_answers_are_measured_on_unseen_ids(library: Path) -> None:
    found = gati.evaluate(library / "library", library / "test.npz")
    assert found.n == 300 and found.hit_rate > 0.1
    assert found.agreement >= 0.75


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_other_engines_answer_ids_alike(served: Served, backend: str) -> None:
    other = served.model.engine_of(served.engine.exits, "other", backend)
    tensors = served.model.preprocessing.tensors
    assert tensors is not None
    x = tensors.example(12, seed=3)
    for ours, theirs in zip(served.engine(x), other(x), strict=True):
        assert (ours.class_index, ours.exit) == (theirs.class_index, theirs.exit)


def test_the_exported_file_takes_ids(library: Path, served: Served) -> None:
    import onnxruntime

    written = gati.export(library / "library", library / "network.onnx")
    assert (written.input_type, written.input_shape) == ("int64", (1, 2, LENGTH))
    session = onnxruntime.InferenceSession(written.path, providers=["CPUExecutionProvider"])
    engine = served.engine
    arrays = sentences(5, seed=2)
    for row in np.stack(list(arrays.values()), axis=1):
        probabilities, _, _ = session.run(None, {"input": row[None]})
        (answer,) = engine(torch.from_numpy(row[None]))
        assert int(probabilities.argmax()) == answer.class_index
    with pytest.raises(DataError, match="--raw-input is for images"):
        gati.export(library / "library", library / "raw.onnx", raw_input=True)


def test_ids_that_the_network_does_not_have_are_refused(served: Served) -> None:
    engine = served.engine
    x = torch.zeros(1, 2, LENGTH, dtype=torch.int64)
    x[0, 0, 3] = 50
    with pytest.raises(DataError, match=r"input_ids holds 50 \(input 0\); ids run from 0 to 49"):
        engine(x)
    with pytest.raises(DataError, match=r"takes torch.int64, got torch.float32"):
        engine(x.float())


def test_pictures_are_refused(library: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (4, 4)).save(tmp_path / "picture.png")
    with pytest.raises(DataError, match=r"reads no images but input_ids int64 \[16\], attention_mask"):
        gati.predict(library / "library", [tmp_path / "picture.png"])


@pytest.mark.parametrize("variant", ["student(8)", "reduced(8)"])
def test_students_that_read_pixels_are_not_for_ids(library: Path, tmp_path: Path, variant: str) -> None:
    with pytest.raises(VariantError, match="reads pictures, the network takes whole numbers: leave it out"):
        gati.explore(MODEL, data=str(library / "val.npz"), out=tmp_path / "out", variants=[variant])
    assert not (tmp_path / "out").exists()


def bad(**changes: Any) -> dict[str, Any]:
    return {**sentences(200), **changes}


@pytest.mark.parametrize("existing", [False, True], ids=["new folder", "folder of the user's"])
@pytest.mark.parametrize(
    ("arrays", "blocks"),
    [(bad(other=np.zeros((200, 2), np.int64)), None), (bad(), "nothing.like.this"), (bad(), "words")],
    ids=["arrays", "pattern", "cut"],
)
def test_an_exploration_that_fails_leaves_nothing(
    tmp_path: Path, arrays: dict[str, Any], blocks: str | None, existing: bool
) -> None:
    np.savez(tmp_path / "val.npz", **arrays)
    out = tmp_path / "runs" / "mine"
    if existing:
        out.mkdir(parents=True)
    module = f"{MODEL}" if blocks != "words" else "tests.token_networks:Unanswering"
    with pytest.raises((ModelError, DataError, BlockError)):
        gati.explore(module, data=str(tmp_path / "val.npz"), out=out, blocks=blocks)
    assert list(tmp_path.rglob("runs/**/*")) == ([out] if existing else [])
    assert (tmp_path / "runs").exists() == existing


def test_what_was_there_before_is_kept(tmp_path: Path) -> None:
    np.savez(tmp_path / "val.npz", **bad())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(BlockError):
        gati.explore(MODEL, data=str(tmp_path / "val.npz"), out=tmp_path / "out", blocks="nothing")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
