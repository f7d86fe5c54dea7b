"""Texts as tokens and back: bytes, or what a `tokenizer.json` says."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gati.errors import ModelError, one_line

_BYTES = 256


class Vocabulary(Protocol):
    """How a network reads and writes."""

    vocabulary: int

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""

    def writer(self) -> Callable[[int], str]:
        """Return what takes tokens one by one, and returns the text that each completes."""


class ByteTokens:
    """The bytes of UTF-8, and one token for the end."""

    vocabulary = _BYTES + 1

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        return list(text.encode())

    def writer(self) -> Callable[[int], str]:
        """Bytes that are no UTF-8 become U+FFFD; those of half a character wait for the other half."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def write(token: int) -> str:
            return decoder.decode(bytes([token]) if token < _BYTES else b"", final=token == _BYTES)

        return write


class StoredTokens:
    """A tokenizer of Hugging Face's, from its file."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError where the file cannot be read, or `tokenizers` is not installed."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ModelError(f"{path} needs tokenizers: pip install tokenizers") from None
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more particular
            raise ModelError(f"{path} is not a tokenizer ({one_line(error)}); copy it again") from error
        self.vocabulary = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        found: list[int] = self._tokenizer.encode(text).ids
        return found

    def writer(self) -> Callable[[int], str]:
        """Tokens of half a character wait for the other half."""
        from tokenizers.decoders import DecodeStream

        stream: Any = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokenizer, token) or ""


def tokens_for(folder: Path | None, vocabulary: int) -> Vocabulary:
    """The tokens of a network: those of its folder's `tokenizer.json`, else bytes.

    Raises ModelError where they do not fit the network's vocabulary.
    """
    path = None if folder is None else folder / "tokenizer.json"
    tokens: Vocabulary = StoredTokens(path) if path is not None and path.is_file() else ByteTokens()
    if tokens.vocabulary > vocabulary:
        raise ModelError(
            f"{path or 'bytes'} has {tokens.vocabulary} tokens, but the network has {vocabulary}; use the "
            "network's own tokenizer"
        )
    return tokens
