"""A small transformer on ids of tokens, as a user would write one, and sentences for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH, CLASSES = 50, 16, 4


class Transformer(nn.Module):
    """Ids [B, length] and a mask of the same shape, 1 where there is a token -> class scores [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32)
        self.places = nn.Embedding(LENGTH, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        if attention_mask is None:
            return self.head(self.encoder(hidden).mean(1))
        hidden = self.encoder(hidden, src_key_padding_mask=attention_mask == 0)
        kept = attention_mask.unsqueeze(2).to(hidden.dtype)
        return self.head((hidden * kept).sum(1) / kept.sum(1))


class Answering(Transformer):
    """Gives what networks of Hugging Face give: a dict with logits."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return {"logits": super().forward(input_ids, attention_mask)}


def small() -> nn.Module:
    network = Transformer()
    with torch.no_grad():  # words matter more than their places
        network.places.weight.mul_(0.1)
        network.words.weight.mul_(3.0)
    return network


def answering() -> nn.Module:
    return Answering()


def sentences(count: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Ids and masks int64 [count, 16], of 3 to 16 tokens; padding is 0."""
    random = np.random.default_rng(seed)
    ids = random.integers(1, VOCABULARY, (count, LENGTH))
    mask = (np.arange(LENGTH) < random.integers(3, LENGTH + 1, (count, 1))).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask}


class Sentences(Dataset[Any]):
    """The same as a data set of dicts."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        found = {name: torch.from_numpy(array[index]) for name, array in sentences(40).items()}
        return found, index % 3


class Unanswering(nn.Module):
    """Gives no class scores at all, which only running it tells."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.words(input_ids) * attention_mask.unsqueeze(2)
