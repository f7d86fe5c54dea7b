"""A transformer on ids of tokens, all the way: explore, compose, evaluate, export, serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import gati
from gati.composition.load import Served, open_served
from gati.errors import BlockError, DataError, ModelError, VariantError
from gati.exploration import candidates
from gati.exploration.library import Library
from tests.services.running import Serving, assert_same_outputs
from tests.token_networks import LENGTH, sentences

pytestmark = pytest.mark.slow

MODEL = "tests.token_networks:small"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for number, name in enumerate(("val", "test")):
        np.savez(folder / f"{name}.npz", **sentences(600 - 500 * number, seed=number))
    # measured next to other programs, this small network is sometimes no slower than a lookup
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "too_slow", lambda *_: "")
        gati.explore(
            MODEL,
            data=str(folder / "val.npz"),
            out=folder / "library",
            blocks="encoder.layers.0",
            epochs=1,
            variants=["tokens-attention(2,32)"],
        )
    found = Library.open(folder / "library")
    cheap = [trial if trial.lookup_ms is None else replace(trial, lookup_ms=1e-4) for trial in found.trials]
    found.write_trials(cheap, list(found.operating_points))
    gati.compose(folder / "library", accuracy=0.8, backend="torch")
    return folder


@pytest.fixture(scope="module")
def served(library: Path) -> Served:
    return open_served(library / "library")


def test_answers_are_measured_on_unseen_ids(library: Path) -> None:
    found = gati.evaluate(library / "library", library / "test.npz")
    assert found.n == 100 and found.hit_rate > 0.1
    assert found.agreement >= 0.7


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
    with pytest.raises(
        DataError, match=r"^predict takes images.* takes input_ids int64 \[16\], attention_mask"
    ):
        gati.predict(library / "library", [tmp_path / "picture.png"])


@pytest.mark.parametrize("variant", ["student(8)", "reduced(8)"])
def test_students_that_read_pixels_are_not_for_ids(tmp_path: Path, variant: str) -> None:
    np.savez(tmp_path / "val.npz", **sentences(100))
    with pytest.raises(VariantError, match="reads floating-point inputs, but the network takes integers"):
        gati.explore(MODEL, data=str(tmp_path / "val.npz"), out=tmp_path / "out", variants=[variant])
    assert not (tmp_path / "out").exists()


def bad(**changes: Any) -> dict[str, Any]:
    return {**sentences(200), **changes}


@pytest.mark.parametrize(
    ("arrays", "blocks", "existing"),
    [
        (bad(other=np.zeros((200, 2), np.int64)), None, False),
        (bad(), "nothing.like.this", True),  # in a folder of the user's
        (bad(), "words", False),
    ],
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


def test_settings_that_fail_do_not_bind_the_corrected_command(tmp_path: Path) -> None:
    np.savez(tmp_path / "val.npz", **bad())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for blocks in ("nothing", "neither"):
        with pytest.raises(BlockError):
            gati.explore(MODEL, data=str(tmp_path / "val.npz"), out=tmp_path / "out", blocks=blocks)


@pytest.fixture(scope="module")
def serving(library: Path) -> Iterator[Serving]:
    settings = '[models.tokens]\nlibrary = "library"\nthreads = 1\nrecords = "sqlite:///records.db"\n'
    (library / "serve.toml").write_text(settings)
    with Serving(library / "serve.toml") as running:
        yield running


def asked(serving: Serving, inputs: list[dict[str, Any]]) -> Any:
    return serving.client.post("/v2/models/tokens/infer", json={"inputs": inputs})


def named(name: str, array: NDArray[Any], datatype: str = "INT64") -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array.tolist()}


def test_another_projects_client_sends_each_array_by_its_name(serving: Serving, served: Served) -> None:
    from tritonclient.http import InferenceServerClient, InferInput

    client = InferenceServerClient(serving.url.removeprefix("http://"))
    taken = client.get_model_metadata("tokens")["inputs"]
    assert [(each["name"], each["datatype"], each["shape"]) for each in taken] == [
        ("input_ids", "INT64", [-1, LENGTH]),
        ("attention_mask", "INT64", [-1, LENGTH]),
    ]
    arrays = sentences(3, seed=4)
    inputs = []
    for name in ("attention_mask", "input_ids"):  # in any order
        given = InferInput(name, list(arrays[name].shape), "INT64")
        given.set_data_from_numpy(arrays[name])
        inputs.append(given)
    found = client.infer("tokens", inputs)
    expected = served.engine(torch.from_numpy(np.stack(list(arrays.values()), axis=1)))
    assert found.as_numpy("class_index").tolist() == [each.class_index for each in expected]
    assert [each.decode() for each in found.as_numpy("exit")] == [each.exit for each in expected]


def test_ids_in_json_by_name_or_packed(serving: Serving) -> None:
    arrays = sentences(2, seed=5)
    by_name = asked(serving, [named(name, array, "INT32") for name, array in arrays.items()]).json()
    packed = asked(serving, [named("input", np.stack(list(arrays.values()), axis=1))]).json()
    assert_same_outputs(by_name["outputs"], packed["outputs"])


IDS, MASK = sentences(2)["input_ids"], sentences(2)["attention_mask"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([named("input_ids", IDS)], "the model takes input_ids, attention_mask, each once; got input_ids"),
        ([named("x", IDS)], "no input is called 'x'; there are input_ids, attention_mask"),
        (
            [named("input_ids", IDS), named("attention_mask", MASK[:1])],
            "`attention_mask` has shape [1, 16]; give [2, 16], with as many rows as `input_ids`",
        ),
        (
            [named("input_ids", IDS * 0.5, "FP32"), named("attention_mask", MASK)],
            "`input_ids` has datatype FP32; send INT64",
        ),
        (
            [named("input_ids", IDS + 50), named("attention_mask", MASK)],
            "ids run from 0 to 49, the rows of the network's embedding",
        ),
        ([named("input", IDS)], "takes a tensor of shape [batch, 2, 16], got [1, 16]"),
        ([named("input", IDS * 1.0, "FP32")], "the input has datatype FP32; the network takes INT64"),
    ],
    ids=["one missing", "unknown", "number", "datatype", "range", "shape", "packed datatype"],
)
def test_requests_that_do_not_fit_get_one_line(
    serving: Serving, inputs: list[dict[str, Any]], message: str
) -> None:
    reply = asked(serving, inputs)
    assert 400 <= reply.status_code < 500
    assert message in reply.json()["error"] and "\n" not in reply.json()["error"]
