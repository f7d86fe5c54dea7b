"""`minilm`: predicts whether a conversation continues, with a frozen sentence encoder and a small network.

The input is that of "learned prefix caching" (LPC): the new prompt and up to four earlier ones share 512
tokens equally, half of each from its start and half from its end. The encoder's mean over all tokens, and the
number of prompts, go through three layers. As in the authors' code, the loss is not weighted, so
the outputs are probabilities.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gati.errors import EvictError, GatiError, one_line
from gati.evict.predict.continuation import MOST, learned_from
from gati.evict.trace.dialogues import EARLIER, Prompts
from gati.model.bert import SentenceEncoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

FILES = ("config.json", "model.safetensors", "tokenizer.json")  # of an encoder's folder
_TOKENS = 512
_READ = EARLIER + 1  # prompts
_HIDDEN = 128
_DROPPED = 0.3
_AT_ONCE = 32  # conversations per batch
_EPOCHS, _RATE, _BATCH = 20, 5e-4, 64
_VALIDATION = 0.15  # share of the samples, taken from the end


class PromptEncoder:
    """A sentence encoder and its tokenizer, from a folder in Hugging Face's format."""

    def __init__(self, folder: str | Path, told: Callable[[int], None] | None = None) -> None:
        """Read a folder. `told` is called with the number of prompts in each batch that was encoded.

        Raises EvictError for a folder without a usable encoder, or without the package `tokenizers`.
        """
        self.folder = Path(folder)
        self._told = told
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise EvictError("minilm needs the package tokenizers: pip install 'gati[text]'") from None
        missing = next((name for name in FILES if not os.path.isfile(self.folder / name)), None)
        if missing is not None:  # a name on a hub, too: nothing is downloaded
            raise EvictError(
                f"{folder} has no usable encoder: there is no {missing}; give the folder of a BERT with "
                f"{', '.join(FILES)}"
            )
        try:
            self._network = SentenceEncoder.from_folder(self.folder)
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(self.folder / FILES[2]))
        except GatiError as error:
            raise EvictError(f"{folder} has no usable encoder: {error}") from error
        except Exception as error:  # the package raises plain exceptions
            raise EvictError(
                f"{folder} has no usable tokenizer ({one_line(error)}); copy it again"
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._begin, self._end = (self._token(name) for name in ("[CLS]", "[SEP]"))
        places, self.width = self._network.embeddings.position_embeddings.weight.shape
        self._most = min(_TOKENS, places)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[Prompts]) -> Tensor:
        """Means over the tokens of each, and log2 of the number of prompts, [n, width + 1].

        Raises EvictError if a conversation has no prompt.
        """
        rows = self._rows(prompts)
        found = torch.empty(len(rows), self.width + 1)
        order = sorted(
            range(len(rows)), key=lambda row: len(rows[row])
        )  # similar lengths need little padding
        for begin in range(0, len(order), _AT_ONCE):
            part = order[begin : begin + _AT_ONCE]
            ids = torch.zeros(len(part), len(rows[part[-1]]), dtype=torch.int64)
            mask = torch.zeros(ids.shape)
            for place, row in enumerate(part):
                ids[place, : len(rows[row])] = torch.tensor(rows[row])
                mask[place, : len(rows[row])] = 1.0
            hidden = self._network(ids, mask) * mask[:, :, None]  # [part, tokens, width]
            found[part, : self.width] = hidden.sum(1) / mask.sum(1, keepdim=True)
            if self._told is not None:
                self._told(len(part))
        found[:, self.width] = torch.tensor([math.log2(max(each.turn, 1)) for each in prompts])
        return found

    def _rows(self, prompts: Sequence[Prompts]) -> list[list[int]]:
        """The tokens of each conversation, truncated to the limit."""
        said = [each.texts[-_READ:] for each in prompts]
        if () in said:
            raise EvictError(f"conversation {said.index(())} has no prompt: leave it out")
        texts = [text for each in said for text in each]
        tokens = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        rows = []
        for each in said:
            room = (self._most - 1) // len(each) - 1
            row = [self._begin]
            for _ in each:
                row += [*_ends(next(tokens).ids, room), self._end]
            rows.append(row)
        return rows

    def _token(self, name: str) -> int:
        found = self._tokenizer.token_to_id(name)
        if found is None:
            raise EvictError(f"the tokenizer in {self.folder} has no token {name}; give a BERT tokenizer")
        return found


class EncodedContinuation:
    """The encoder and the network on top of it, in evaluation mode. Thread-safe.

    The other prompts of a batch affect a prediction only by rounding.
    """

    quick = False  # whether a server may predict on its event loop's thread

    def __init__(self, encoder: PromptEncoder, head: nn.Module) -> None:
        self.encoder = encoder
        self.head = head.eval()

    def predict(self, prompts: Sequence[Prompts]) -> Floats:
        """The probabilities that another prompt follows, [prompts], from 1 - MOST to MOST.

        Raises EvictError if a conversation has no prompt.
        """
        if not prompts:
            return np.zeros(0)
        with torch.inference_mode():
            odds = self.head(self.encoder.encode(prompts))[:, 0]
            shares: Floats = odds.double().sigmoid().numpy()
        return np.minimum(np.maximum(shares, 1.0 - MOST), MOST)

    def digest(self) -> str:
        """A hash that identifies the trained model."""
        learned = hashlib.sha256()
        for value in self.head.state_dict().values():
            learned.update(value.numpy().tobytes())
        return learned.hexdigest()


def new_head(width: int) -> nn.Module:
    """Three layers for vectors [n, width + 1]; log odds [n, 1]."""
    layers: list[nn.Module] = []
    for inputs in (width + 1, _HIDDEN):
        layers += [nn.Linear(inputs, _HIDDEN), nn.BatchNorm1d(_HIDDEN), nn.ReLU(), nn.Dropout(_DROPPED)]
    return nn.Sequential(*layers, nn.Linear(_HIDDEN, 1))


def fit_encoded(
    prompts: Sequence[Prompts], goes_on: Flags, encoder: PromptEncoder, seed: int = 0
) -> EncodedContinuation:
    """Fit to samples and whether another prompt followed each, [samples].

    The last samples are held out to choose the epoch of the lowest log loss, so samples of one conversation
    should be adjacent. Raises EvictError if either part has only one class.
    """
    learned = learned_from(goes_on, _VALIDATION)
    rows, wanted = encoder.encode(prompts).clone(), torch.from_numpy(goes_on).float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = _trained(new_head(encoder.width), rows, wanted, learned)
    return EncodedContinuation(encoder, head)


def _trained(head: nn.Module, rows: Tensor, wanted: Tensor, learned: int) -> nn.Module:
    optimiser = torch.optim.Adam(head.parameters(), lr=_RATE)
    loss_of = nn.functional.binary_cross_entropy_with_logits
    best: dict[str, Any] = {}
    lowest = math.inf
    for _ in range(_EPOCHS):
        head.train()
        order = torch.randperm(learned)
        for part in order.split(_BATCH):
            if len(part) > 1:  # normalisation needs at least two samples
                optimiser.zero_grad()
                loss_of(head(rows[part])[:, 0], wanted[part]).backward()
                optimiser.step()
        head.eval()
        with torch.inference_mode():
            loss = float(loss_of(head(rows[learned:])[:, 0], wanted[learned:]))
        if loss < lowest:
            lowest = loss
            best = {name: value.detach().clone() for name, value in head.state_dict().items()}
    if not best:
        raise EvictError("the loss of the continuation model is not finite; check the dialogues")
    head.load_state_dict(best)
    return head


def _ends(tokens: list[int], room: int) -> list[int]:
    """Truncate tokens to the available room: half is taken from the start and half from the end."""
    if len(tokens) <= room:
        return tokens
    return tokens[: room - room // 2] + tokens[len(tokens) - room // 2 :]
