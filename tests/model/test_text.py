"""How texts are filled up and cut, as the network and its tokenizer want it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gati.model.data import load_data
from gati.model.load import load_model
from gati.model.packed import fit_text
from gati.model.preprocess import Preprocessing
from gati.model.text import TextTokens, read_tokenizer
from tests.text_networks import write_tokenizer

pytest.importorskip("tokenizers")

# As GPT-2 does in `transformers`: the class scores are those of the last token that is not padding.
OF_TRANSFORMERS = """
from types import SimpleNamespace

import torch
from torch import nn


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 3)
        self.config = SimpleNamespace(pad_token_id=39)

    def forward(self, input_ids, attention_mask=None):
        places = torch.arange(input_ids.shape[1]) * (input_ids != self.config.pad_token_id)
        return self.words(input_ids)[torch.arange(len(input_ids)), places.argmax(1)]


net = Last()
"""


def test_texts_are_filled_up_with_the_padding_of_the_network(tmp_path: Path) -> None:
    """Tokenizers of such networks often name none, and 0 is a word: its scores would be the answer."""
    (tmp_path / "own.py").write_text(OF_TRANSFORMERS)
    (tmp_path / "val.csv").write_text("text\nwhere is my card\nwhy\n" + "fee " * 20 + "\n")
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    loaded = fit_text(load_model(f"{tmp_path / 'own.py'}:net", tokenizer=tokenizer))
    data = load_data(tmp_path / "val.csv", loaded.preprocessing)
    ids, mask = data.images([0, 1, 2]).unbind(1)
    assert mask.sum(1).tolist() == [6, 3, 22]
    assert bool((ids[mask == 0] == 39).all())
    assert loaded.module(ids).equal(loaded.module.words(ids[0, 5].repeat(3)))  # [SEP] is the last word of all
    again = Preprocessing.from_json(loaded.preprocessing.to_json(), tmp_path)
    assert again == loaded.preprocessing


@pytest.mark.parametrize("padding", ["0", "None"], ids=["the same", "none"])
def test_otherwise_the_tokenizers_own_padding_stays(tmp_path: Path, padding: str) -> None:
    (tmp_path / "own.py").write_text(OF_TRANSFORMERS.replace("39", padding))
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    text = load_model(f"{tmp_path / 'own.py'}:net", tokenizer=tokenizer).preprocessing.text
    assert text is not None and text.padding is None and "padding" not in text.to_json()


@pytest.mark.parametrize(("side", "expected"), [("right", [2, 10, 11, 3]), ("left", [2, 12, 4, 3])])
def test_texts_are_cut_at_the_tokenizers_side(tmp_path: Path, side: str, expected: list[int]) -> None:
    from tokenizers import Tokenizer

    path = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(512, direction=side)
    tokenizer.save(str(path))
    text = replace(read_tokenizer(path, max_length=4), arrays=("input_ids",))
    assert text.encode(["where is my card"], "texts")["input_ids"].tolist() == [expected]
    stored = text.to_json()
    assert TextTokens.from_json(stored, tmp_path) == text
    stored.pop("side", None)
    older = TextTokens.from_json(stored, tmp_path)
    assert older.encode(["where is my card"], "texts")["input_ids"].tolist() == [[2, 10, 11, 3]], "certified"
