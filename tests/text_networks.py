"""A tokenizer of a few dozen words, a small transformer that reads it, and texts for both."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WORDS = ("card", "cash", "fee", "lost", "top", "transfer", "where", "is", "my", "the", "a", "please", "why")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCABULARY, LONGEST, CLASSES = len(SPECIAL) + len(WORDS), 48, 3


def write_tokenizer(path: Path, *, extra: int = 0, truncation: int | None = None) -> Path:
    """A `tokenizer.json` of whole words, `extra` of which the network does not know."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    words = (*SPECIAL, *(f"new{number}" for number in range(extra)), *WORDS)
    places = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(places, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    ends = [(name, places[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    if truncation is not None:
        tokenizer.enable_truncation(truncation)
    tokenizer.save(str(path))
    return path


class Reader(nn.Module):
    """Ids and mask [B, length <= 48] -> class scores [B, 3], mostly by which words there are."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.places = nn.Embedding(LONGEST, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        hidden = self.encoder(hidden, src_key_padding_mask=attention_mask == 0)
        kept = attention_mask.unsqueeze(2).to(hidden.dtype)
        return self.head((hidden * kept).sum(1) / kept.sum(1))


def reader() -> nn.Module:
    network = Reader()
    with torch.no_grad():
        network.places.weight.mul_(0.05)
        network.words.weight.mul_(3.0)
    return network


def texts(count: int, seed: int = 0, longest: int = 30) -> list[str]:
    """Texts of 2 to `longest` words, most of them short, and all different."""
    random = np.random.default_rng(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        words = 2 + int((longest - 1) * random.random() ** 2)
        found[" ".join(random.choice(WORDS, words))] = None
    return list(found)


def write_table(path: Path, rows: list[str], **columns: list[Any]) -> Path:
    """A CSV with a column `text`, and others."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", *columns])
        writer.writerows(zip(rows, *columns.values(), strict=True))
    return path
