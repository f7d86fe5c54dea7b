"""A network and raw text: every verb reads it through the tokenizer that the library keeps."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gati
from gati.cli import run
from gati.composition.load import Served, open_served
from gati.engine.engine import Engine
from gati.errors import DataError
from gati.exploration.library import Library
from gati.model.data import load_data
from gati.model.load import load_model
from gati.model.packed import fit_text
from tests.services.running import Serving, assert_same_outputs
from tests.text_networks import LONGEST, VOCABULARY, WORDS, texts, write_table, write_tokenizer

pytestmark = pytest.mark.slow

MODEL = "tests.text_networks:reader"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts in tables, a tokenizer, and a library explored and composed from them."""
    folder = tmp_path_factory.mktemp("texts")
    tokenizer = write_tokenizer(folder / "given.json")
    for number, (name, count) in enumerate((("val", 500), ("test", 40))):
        rows = texts(count, seed=number)
        write_table(folder / f"{name}.csv", rows, label=["abc"[len(row) % 3] for row in rows])
    gati.explore(
        MODEL,
        data=str(folder / "val.csv"),
        out=folder / "library",
        tokenizer=tokenizer,
        blocks="encoder.layers.0",
        epochs=1,
        variants=["tokens-attention(2,32)"],
    )
    tokenizer.unlink()  # from here on the library's own copy is what there is
    gati.compose(folder / "library", accuracy=0.8, backend="torch")
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return open_served(folder / "library")


def test_the_library_keeps_tokenizer_lengths_and_names(folder: Path) -> None:
    library = Library.open(folder / "library")
    text = library.preprocessing.text
    assert text is not None and text.content() == (folder / "library" / "tokenizer.json").read_bytes()
    assert text.arrays == ("input_ids", "attention_mask")
    assert text.length == 32  # the longest text has 32 tokens; the network takes 48
    assert library.manifest.preprocessing["text"]["sha256"] == text.sha256  # exported files have this, too
    assert [length for length, _ in library.preprocessing.lengths] == [16, 32]
    assert sum(share for _, share in library.preprocessing.lengths) == pytest.approx(1.0)
    assert library.manifest.class_names == ("a", "b", "c")


def test_answers_are_measured_on_texts(folder: Path) -> None:
    found = gati.evaluate(folder / "library", folder / "test.csv")
    assert found.n == 40 and found.agreement >= 0.6
    assert found.accuracy is not None


def test_texts_are_predicted(
    folder: Path, served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("gati.evaluation.predict"), "load", lambda *_, **__: served.engine)
    rows = texts(3, seed=7, longest=4)
    assert run(["predict", str(folder / "library"), *rows]) == 0
    said = capsys.readouterr().out
    for text, answer in zip(rows, served.engine(served.model.preprocessing.from_texts(rows)), strict=True):
        assert re.search(rf"{text} +{answer.class_name} .* {answer.exit}", said)
    assert run(["predict", str(folder / "library"), "where is my card", " "]) == 2
    assert "predict: text 1 is empty" in capsys.readouterr().err


@pytest.fixture(scope="module")
def engine(served: Served) -> Engine:
    return served.model.engine_of(served.engine.exits, "other", "onnxruntime")


def test_texts_are_executed_at_their_real_length(engine: Engine, served: Served) -> None:
    x = served.model.preprocessing.from_texts(["my card", "card " * 25])
    assert x.shape == (2, 2, 32)
    assert [engine.shortened(row[None]).shape[2] for row in x] == [16, 32]
    assert [engine.shortened(each).shape[2] for each in engine.examples()] == [16, 32]


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 14))
@settings(max_examples=8, deadline=None)
def test_neither_padding_nor_batch_changes_an_answer(
    engine: Engine, served: Served, seed: int, count: int, cut: int
) -> None:
    x = served.model.preprocessing.from_texts(texts(count, seed=seed))
    together = engine(x)
    for row, answer in zip(x, together, strict=True):
        tokens = int(row[1].sum())
        (alone,) = engine(row[None])
        (shorter,) = engine(row[None, :, : max(tokens, 32 - cut)])
        (other,) = served.engine(row[None])
        assert torch.equal(alone.probabilities, shorter.probabilities)
        for each in (alone, shorter, other):
            assert (each.class_index, each.exit) == (answer.class_index, answer.exit)
        with torch.inference_mode():
            padded = served.module(row[None]).softmax(1)  # as the network is, executed at the full length
        (base,) = served.engine.base(row[None])
        torch.testing.assert_close(base.probabilities[None], padded, atol=1e-4, rtol=1e-3)


def test_a_changed_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "library", tmp_path / "library")
    write_tokenizer(tmp_path / "library" / "tokenizer.json", extra=3)
    with pytest.raises(DataError, match=r"tokenizer .* has changed; restore it"):
        gati.predict(tmp_path / "library", ["where is my card"])


# Tables -----------------------------------------------------------------------------------------------------


def read(path: Path, **options: Any) -> Any:
    tokenizer = write_tokenizer(path.parent / "tokenizer.json")
    loaded = fit_text(load_model(MODEL, tokenizer=tokenizer, **options))
    return load_data(path, loaded.preprocessing)


def test_csv_and_parquet_are_read_alike(tmp_path: Path) -> None:
    import gzip

    import pyarrow as pa
    from pyarrow import parquet

    rows, kinds = texts(20), [number % 3 for number in range(20)]
    plain = write_table(tmp_path / "a.csv", rows, label=kinds)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    parquet.write_table(pa.table({"text": rows, "label": kinds}), tmp_path / "c.parquet")
    found = [read(tmp_path / name) for name in ("a.csv", "b.csv.gz", "c.parquet")]
    assert len({each.fingerprint for each in found}) == 1
    assert found[0].labels.tolist() == kinds and found[0].class_names is None
    assert not found[0].is_images


def test_columns_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "query", "intent"], [1, "my card", "lost"], [2, "a fee", "fees"]])
    found = read(path, text_column="query", label_column="intent")
    assert found.class_names == ("fees", "lost") and found.labels.tolist() == [1, 0]
    assert read(path, text_column="query").labels is None


def test_ids_are_those_of_the_tokenizer_and_padding_is_masked(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv", ["my card", "where is the unheardof fee please"])
    found = read(path)
    place = {word: 4 + number for number, word in enumerate(WORDS)}
    ids, mask = found.images(slice(None))[:, 0], found.images(slice(None))[:, 1]
    assert ids.shape == (2, 16)
    assert ids[0].tolist() == [2, place["my"], place["card"], 3] + 12 * [0]
    words = [place[word] for word in ("where", "is", "the", "fee", "please")]
    assert ids[1].tolist() == [2, *words[:3], 1, *words[3:], 3] + 8 * [0]
    assert mask.sum(1).tolist() == [4, 8]


@pytest.mark.parametrize(
    ("given", "tokenizers_own", "length"), [(None, None, LONGEST), (None, 20, 20), (9, 20, 9)]
)
def test_long_texts_are_cut(
    tmp_path: Path, given: int | None, tokenizers_own: int | None, length: int
) -> None:
    path = write_table(tmp_path / "a.csv", ["card " * 200])
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", truncation=tokenizers_own)
    loaded = fit_text(load_model(MODEL, tokenizer=tokenizer, max_length=given))
    ids = load_data(path, loaded.preprocessing).images([0])[0, 0]
    assert ids.tolist() == [2, *(length - 2) * [4], 3]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"text\n", (), "is empty; give at least a few hundred texts"),
        (b"text\nmy card\n \n", (), "`text` of row 1 is empty; remove that row"),
        (b"query\nmy card\n", (), "has no column `text` (columns: query); name it with --text-column"),
        (b"text\nmy card\n", ("--label-column", "kind"), "has no column `kind` (columns: text)"),
        (b"text,label\nmy card,\n", (), "row 0 has no label; give it one, or remove the row"),
        ("text\ncafé\n".encode("latin-1"), (), "is not UTF-8"),
        (b'text\n"my card', (), "give enough for at least"),
    ],
    ids=["no rows", "empty", "column", "label column", "no label", "encoding", "too few"],
)
def test_tables_that_do_not_fit_get_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "val.csv").write_bytes(content)
    assert explored(tmp_path, *options) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def explored(folder: Path, *options: str) -> int:
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        write_tokenizer(tokenizer)
    given = ["--data", str(folder / "val.csv"), *options]
    if "--tokenizer" not in options:
        given += ["--tokenizer", str(tokenizer)]
    return run(["explore", MODEL, *given, "--out", str(folder / "out"), "--epochs", "1"])


def test_another_networks_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path / "val.csv", texts(80))
    write_tokenizer(tmp_path / "tokenizer.json", extra=30)
    assert explored(tmp_path) == 2
    said = capsys.readouterr().err
    assert f"ids run from 0 to {VOCABULARY - 1}, the rows of the network's embedding" in said
    assert "is this the network's tokenizer?" in said and said.count("\n") == 1


@pytest.mark.parametrize("longest", ["card " * 60, "card"])
def test_lengths_beyond_the_network_are_refused_however_short_the_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], longest: str
) -> None:
    write_table(tmp_path / "val.csv", [*texts(80), longest])
    assert explored(tmp_path, "--max-length", "64") == 2
    said = capsys.readouterr().err
    assert f"takes at most {LONGEST} tokens; give --max-length {LONGEST}" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer at"),
        ("{}", "is not a tokenizer (KeyError)"),
        ("no", "is not a tokenizer"),
        ('{"model": {}}', "cannot be used"),
    ],
    ids=["missing", "no model", "no JSON", "damaged"],
)
def test_files_that_are_no_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    write_table(tmp_path / "val.csv", texts(80))
    if content is not None:
        (tmp_path / "none.json").write_text(content)
    assert explored(tmp_path, "--tokenizer", str(tmp_path / "none.json")) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_texts_without_a_tokenizer_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_table(tmp_path / "val.csv", texts(80))
    assert run(["explore", MODEL, "--data", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "holds texts; give the network's tokenizer: --tokenizer FILE" in capsys.readouterr().err


def test_the_package_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gati.model import text

    text._tokenizer.cache_clear()
    monkeypatch.setattr(text, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'gati\[text\]'"):
        read(write_table(tmp_path / "a.csv", texts(3)))


def test_the_doctor_looks_at_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gati.engine.backends import BACKENDS

    monkeypatch.setattr(
        import_module("gati.evaluation.engine_speeds"), "BACKENDS", {"torch": BACKENDS["torch"]}
    )
    path = write_table(tmp_path / "val.csv", texts(90))
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    found = gati.doctor(MODEL, data=str(path), tokenizer=tokenizer, within_s=1e3)
    assert found.input_shape == (2, 32) and found.can_be_cut and not found.refused
    assert {lookup.variant.partition("(")[0] for lookup in found.lookups} <= {
        "tokens-student",
        "tokens-mean",
        "tokens-attention",
        "tokens-conv",
    }


def test_lengths_that_are_not_executed_are_not_exported(folder: Path) -> None:
    with pytest.raises(DataError, match="--length is 20, but the network runs at 16, 32; choose one"):
        gati.export(folder / "library", folder / "text.onnx", length=20)


def test_short_texts_have_a_file_of_their_own(folder: Path, served: Served) -> None:
    import onnxruntime

    written = gati.export(folder / "library", folder / "short.onnx", length=16)
    assert written.input_shape == (1, 2, 16)
    session = onnxruntime.InferenceSession(written.path, providers=["CPUExecutionProvider"])
    inputs = served.model.preprocessing.from_texts(texts(20, seed=3, longest=12))
    for row, answer in zip(inputs.split(1), served.engine(inputs), strict=True):
        probabilities, _, _ = session.run(None, {"input": row[..., :16].numpy()})
        assert int(probabilities.argmax()) == answer.class_index


# Served -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Serving]:
    settings = '[models.texts]\nlibrary = "library"\nthreads = 1\nrecords = "sqlite:///records.db"\n'
    (folder / "serve.toml").write_text(settings)
    with Serving(folder / "serve.toml") as running:
        yield running


def test_the_metadata_name_text_and_arrays(serving: Serving, served: Served) -> None:
    found = serving.client.get("/v2/models/texts").json()
    assert [(each["name"], each["datatype"], each["shape"]) for each in found["inputs"]] == [
        ("text", "BYTES", [-1]),
        ("input_ids", "INT64", [-1, -1]),
        ("attention_mask", "INT64", [-1, -1]),
    ]
    assert found["parameters"]["longest_input"] == 32
    assert found["parameters"]["input_alternatives"] == [["text"], ["input_ids", "attention_mask"]]
    text = served.model.preprocessing.text
    assert text is not None
    assert found["parameters"]["tokenizer"] == {"sha256": text.sha256, "max_length": text.length}


def test_another_projects_client_sends_text_or_arrays(serving: Serving, served: Served) -> None:
    from tritonclient.http import InferenceServerClient, InferInput

    client = InferenceServerClient(serving.url.removeprefix("http://"))
    rows = texts(4, seed=9)
    ids = served.model.preprocessing.from_texts(rows)
    expected = [each.class_index for each in served.engine(ids)]
    for binary in (True, False):
        given = InferInput("text", [4], "BYTES")
        given.set_data_from_numpy(np.array([row.encode() for row in rows], dtype=object), binary_data=binary)
        found = client.infer("texts", [given])
        assert found.as_numpy("class_index").tolist() == expected
        assert [each.decode() for each in found.as_numpy("class_name")] == ["abc"[each] for each in expected]
    longest = int(ids[:, 1].sum(1).max())
    for length in (ids.shape[2], longest):
        arrays = []
        for place, name in enumerate(("input_ids", "attention_mask")):
            arrays.append(InferInput(name, [4, length], "INT64"))
            arrays[-1].set_data_from_numpy(ids[:, place, :length].numpy())
        assert client.infer("texts", arrays).as_numpy("class_index").tolist() == expected


def asked(serving: Serving, data: Any, shape: list[int], name: str = "text") -> Any:
    given = {"name": name, "shape": shape, "datatype": "BYTES", "data": data}
    return serving.client.post("/v2/models/texts/infer", json={"inputs": [given]})


def test_texts_in_json_flat_or_nested(serving: Serving) -> None:
    rows = texts(2, seed=5)
    flat, nested = asked(serving, rows, [2]).json(), asked(serving, [[row] for row in rows], [2, 1]).json()
    assert_same_outputs(flat["outputs"], nested["outputs"])


@pytest.mark.parametrize(
    ("data", "shape", "message"),
    [
        (["my card", " "], [2], "text 1 is empty; remove it"),
        (["my card"], [2], "`data` has 1 texts and shape [2] takes 2"),
        ([1, 2], [2], "`data` is not a BYTES tensor; give a list of texts"),
        ("my card", [1], "the input has no `data`; give a list of texts"),
        (["my card"], [1, 1, 1], "text has shape [1, 1, 1]; send BYTES [batch] or [batch, 1]"),
        (["card " * 40_000], [1], "a text of 200000 characters; send at most 65536"),
    ],
    ids=["empty", "number", "numbers", "no list", "shape", "long"],
)
def test_texts_that_do_not_fit_get_one_line(
    serving: Serving, data: Any, shape: list[int], message: str
) -> None:
    reply = asked(serving, data, shape)
    assert 400 <= reply.status_code < 500
    assert message in reply.json()["error"] and "\n" not in reply.json()["error"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x02\0\0\0\xff\xfe", "text 0 is not UTF-8"),
        (b"\x09\0\0\0ab", "shape [1] of BYTES does not fit 6 bytes"),
    ],
    ids=["encoding", "short"],
)
def test_bytes_that_are_no_text_get_one_line(serving: Serving, content: bytes, message: str) -> None:
    given = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}}
    head = json.dumps({"inputs": [given]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    reply = serving.client.post("/v2/models/texts/infer", content=head + content, headers=headers)
    assert reply.status_code == 400 and message in reply.json()["error"]


def test_the_query_command_asks_in_text(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "texts", "where is my card", "--url", serving.url]) == 0
    said = capsys.readouterr().out
    assert "where is my card" in said and "version default" in said
    assert run(["query", "texts", "--text", "my fee", "--text", "lost", "--url", serving.url]) == 0
    said = capsys.readouterr().out
    assert "my fee" in said and "lost" in said
    assert run(["query", "texts", "--url", serving.url]) == 2
    assert "give one image file, one recording or one text, or repeat --text" in capsys.readouterr().err
