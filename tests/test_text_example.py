"""The example that makes a text classifier, on an encoder of random weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from examples import train_text_classifier
from gati.model.data import load_data
from gati.model.load import load_model
from gati.model.packed import fit_tensors, fit_text
from tests.model.test_bert import folder
from tests.text_networks import texts, write_table, write_tokenizer


def test_what_it_writes_is_what_explore_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "encoder").mkdir()
    write_tokenizer(folder(tmp_path / "encoder") / "tokenizer.json")
    rows = texts(120, longest=5)
    kinds = ["lost" if "card" in row else "other" for row in rows]
    table, out = write_table(tmp_path / "all.csv", rows, intent=kinds), tmp_path / "intents"
    given = [str(tmp_path / "encoder"), str(table), "--label-column", "intent", "--max-length", "8"]
    monkeypatch.setattr(sys, "argv", ["train", *given, "--out", str(out)])
    assert train_text_classifier.main() == 0
    assert (out / "classes.txt").read_text().split() == ["lost", "other"]
    loaded = fit_text(
        load_model(
            f"{out / 'network.py'}:network", out / "network.safetensors", tokenizer=out / "tokenizer.json"
        )
    )
    train, known = (load_data(out / f"{name}.csv", loaded.preprocessing) for name in ("train", "known"))
    assert (len(train), len(known)) == (72, 48) and known.class_names == ("lost", "other")
    assert train.tensors is not None
    network = fit_tensors(loaded, train.tensors, "train").module
    with torch.inference_mode():
        answers = network(train.images(range(72))).argmax(1)
    assert (answers.numpy() == train.labels).mean() > 0.9
