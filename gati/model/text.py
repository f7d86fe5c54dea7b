"""A tokenizer as the front end of a network that reads tokens.

Data flow: **text** -> tokenizer -> ids, truncated to `length` -> padding -> arrays **int64 [N, length]**.
A tokenizer is a file `tokenizer.json` of the package `tokenizers`; nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import DataError, one_line
from gati.model.masks import MASK

IDS, KINDS = "input_ids", "token_type_ids"  # MASK is the third array
TOKENIZER = "tokenizer.json"

_LONGEST = 512  # default number of ids per text
_LARGEST_BYTES = 256 << 20  # of a tokenizer
_SHORTEST_BUCKET = 16
_PADDING = ("[PAD]", "<pad>", "<|pad|>")
_FEW = 32  # texts; for so few, the tokenizer's own threads do not pay off


@dataclass(frozen=True)
class TextTokens:
    """A tokenizer front end, which turns text into the arrays that a network takes.

    Texts are truncated to `length` ids; `asked` if the user gave it. `arrays` are the names of the network's
    inputs, empty until they are known. In tables, texts are in `text_column` and classes in `label_column`
    (None: `label` if it exists). `padding` is the id that fills up texts, by default the tokenizer's own.
    `side` is where texts that are too long are cut. `path` is the tokenizer's file, whose hash is `sha256`.
    """

    sha256: str
    length: int
    arrays: tuple[str, ...] = ()
    asked: bool = False
    text_column: str = "text"
    label_column: str | None = None
    padding: int | None = None
    side: str = "right"
    path: str = field(default="", compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values without the path: a cache library has a copy of the file."""
        plain = asdict(self)
        del plain["path"]
        if self.padding is None:
            del plain["padding"]
        if self.side == "right":  # of older libraries, whatever their tokenizer says
            del plain["side"]
        return {**plain, "arrays": list(self.arrays)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], folder: Path | None) -> TextTokens:
        """Read what `to_json` wrote; the tokenizer is in `folder`, if given."""
        path = "" if folder is None else str(folder / TOKENIZER)
        return cls(**{**values, "arrays": tuple(values["arrays"])}, path=path)

    def content(self) -> bytes:
        """The tokenizer's file. Raises `DataError` if it is missing or has changed."""
        content = _content(Path(self.path))
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise DataError(f"the tokenizer {self.path} has changed; restore it, or run gati explore again")
        return content

    def encode(
        self, texts: Sequence[str], what: str, length: int | None = None
    ) -> dict[str, NDArray[np.int64]]:
        """Encode texts as arrays int64 [N, length], by default of the shortest bucket that holds all of them.

        **Raises:** `DataError` for empty texts, an unreadable tokenizer, or if `tokenizers` is missing.
        """
        for number, text in enumerate(texts):
            if not text.strip():
                raise DataError(f"{what}: text {number} is empty; remove it")
        tokenizer, padding = _tokenizer(self, length or self.length)
        encoded = _encoded(tokenizer, texts, what)
        longest = max((len(each.ids) for each in encoded), default=0)
        if length is None:
            length = next(each for each in bucket_lengths(self.length) if each >= longest)
        ids = np.full((len(texts), length), padding, dtype=np.int64)
        mask, kinds = np.zeros((2, *ids.shape), dtype=np.int64)
        for row, each in enumerate(encoded):
            tokens = len(each.ids)
            ids[row, :tokens], mask[row, :tokens] = each.ids, each.attention_mask
            kinds[row, :tokens] = each.type_ids
        known = {IDS: ids, MASK: mask, KINDS: kinds}
        return {name: known.get(name, ids) for name in self.arrays}


def _encoded(tokenizer: Any, texts: Sequence[str], what: str) -> list[Any]:
    """The encoding of each text. Raises `DataError` if that fails or is empty."""
    several = len(texts) > _FEW
    try:
        found = tokenizer.encode_batch(texts) if several else [tokenizer.encode(text) for text in texts]
    except Exception as error:  # the package raises plain exceptions
        raise DataError(
            f"{what}: the tokenizer fails ({one_line(error)}); is this the network's tokenizer?"
        ) from error
    for number, each in enumerate(found):
        if not each.ids:
            raise DataError(f"{what}: text {number} has no tokens; remove it")
    return list(found)


def bucket_lengths(longest: int) -> tuple[int, ...]:
    """The lengths that sequences are padded to: 16, 32, 64 and so on, and the longest."""
    lengths = []
    length = _SHORTEST_BUCKET
    while length < longest:
        lengths.append(length)
        length *= 2
    return (*lengths, longest)


def read_tokenizer(
    source: str | Path,
    *,
    max_length: int | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
) -> TextTokens:
    """Read a local `tokenizer.json`, or the one in a folder.

    Texts are truncated to `max_length` ids, by default the tokenizer's own maximum, at most 512 and at most
    what the network takes.

    **Raises:** `DataError` for a file that is missing or not a tokenizer, or a `max_length` below 1.
    """
    if max_length is not None and max_length < 1:
        raise DataError(f"--max-length is {max_length}; give a number of tokens above 0")
    path = Path(source) / TOKENIZER if os.path.isdir(source) else Path(source)
    content = _content(path)
    try:
        found = json.loads(content)
        if not isinstance(found["model"], dict):
            raise TypeError("its model is not an object")
        truncation = found.get("truncation") or {}
        own = truncation.get("max_length") or _LONGEST
        side = str(truncation.get("direction", "right")).lower()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a tokenizer ({type(error).__name__}); give one that `tokenizers` wrote"
        ) from error
    return TextTokens(
        hashlib.sha256(content).hexdigest(),
        max_length or min(int(own), _LONGEST),
        asked=max_length is not None,
        text_column=text_column or "text",
        label_column=label_column,
        side=side,
        path=str(path.resolve()),
    )


def with_padding(text: TextTokens, padding: int | None) -> TextTokens:
    """The same with the `padding` of a network, if it has one and that is not the tokenizer's own.

    **Raises:** `DataError` as `encode`, about the tokenizer.
    """
    if padding is None or _tokenizer(text, text.length)[1] == padding:
        return text
    return replace(text, padding=padding)


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise DataError(f"tokenizer {path} has over {_LARGEST_BYTES >> 20} MiB; give a tokenizer.json")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"no tokenizer at {path} ({error.strerror}); give a tokenizer.json") from error


@lru_cache(maxsize=16)
def _tokenizer(text: TextTokens, length: int) -> tuple[Any, int]:
    """The tokenizer, which truncates to `length`, and the padding id."""
    if find_spec("tokenizers") is None:
        raise DataError("text needs the package tokenizers: pip install 'gati[text]'")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text.content().decode("utf-8"))
        named = (tokenizer.padding or {}).get("pad_id") if text.padding is None else text.padding
        if named is None:
            known = (tokenizer.token_to_id(token) for token in _PADDING)
            named = next((each for each in known if each is not None), 0)
        tokenizer.no_padding()
        tokenizer.enable_truncation(length, direction=text.side)
    except DataError:
        raise
    except Exception as error:  # the package raises plain exceptions
        raise DataError(
            f"the tokenizer {text.path} cannot be used for {length} tokens ({one_line(error)}); give the "
            "network's tokenizer.json, and a larger --max-length if that is small"
        ) from error
    return tokenizer, int(named)
