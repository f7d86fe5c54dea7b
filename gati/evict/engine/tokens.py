"""Conversion between texts and tokens: bytes, or a `tokenizer.json`."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from gati.errors import ModelError, one_line

_BYTES = 256
_CONTEXT = 32  # tokens of a prompt: its whole text would take longer, and change nothing
_INCOMPLETE = "\ufffd"


class Vocabulary(Protocol):
    """The interface of tokenizers."""

    vocabulary: int

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""

    def writer(self, prompt: Sequence[int] = ()) -> Callable[[int], str]:
        """Return a function that takes one token after another, and returns the text that each completes.

        The tokens follow those of `prompt`, whose text is not returned.
        """


class ByteTokens:
    """The bytes of UTF-8, and one token for the end."""

    vocabulary = _BYTES + 1

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        return list(text.encode())

    def writer(self, prompt: Sequence[int] = ()) -> Callable[[int], str]:
        """Invalid UTF-8 becomes U+FFFD; an incomplete character waits for its remaining bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def write(token: int) -> str:
            return decoder.decode(bytes([token]) if token < _BYTES else b"", final=token == _BYTES)

        return write


class StoredTokens:
    """A Hugging Face tokenizer, from its file."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file cannot be read, or `tokenizers` is not installed."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ModelError(f"{path} needs tokenizers: pip install tokenizers") from None
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain exceptions
            raise ModelError(f"{path} is not a tokenizer ({one_line(error)}); copy it again") from error
        self.vocabulary = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        found: list[int] = self._tokenizer.encode(text).ids
        return found

    def writer(self, prompt: Sequence[int] = ()) -> Callable[[int], str]:
        """An incomplete character waits for its remaining tokens."""
        return _StoredWriter(self._decode, prompt)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class _StoredWriter:
    """Decodes each token together with those before it: many decoders drop the first space of a text.

    The library's own `DecodeStream` raises an exception where invalid bytes follow a character.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt[-_CONTEXT:])
        if decode(self._tokens).endswith(_INCOMPLETE):  # else the token that completes it would be dropped
            self._tokens = []
        self._told = len(self._tokens)  # leading tokens whose text was returned

    def __call__(self, token: int) -> str:
        before = self._decode(self._tokens[: self._told])
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if len(text) <= len(before) or text.endswith(_INCOMPLETE):
            return ""
        self._tokens = self._tokens[self._told :]
        self._told = len(self._tokens)
        return text[len(before) :]


def tokens_for(folder: Path | None, vocabulary: int) -> Vocabulary:
    """The tokenizer of a network: its folder's `tokenizer.json`, else bytes.

    Raises ModelError if it does not fit the network's vocabulary.
    """
    path = None if folder is None else folder / "tokenizer.json"
    tokens: Vocabulary = StoredTokens(path) if path is not None and path.is_file() else ByteTokens()
    if tokens.vocabulary > vocabulary:
        raise ModelError(
            f"{path or 'bytes'} has {tokens.vocabulary} tokens, but the network has {vocabulary}; use the "
            "network's own tokenizer"
        )
    return tokens
